"""The mode that is in force: as it was set, or as the policy chooses.

Plain Python, no vLLM.
"""

from minedraft import config
from minedraft.verifier.choices import OFF, Choice, Mode, Step
from minedraft.verifier.policy import Policy


class Modes:
    """Decides for each step. ``setting`` may be changed by any thread at any time."""

    def __init__(self, setting: config.Mode, most_drafts: int) -> None:
        self.setting: config.Mode = setting
        self.most_drafts = most_drafts
        """Draft tokens for each verification in a mode that is set. The policy chooses its own."""
        self.policy = Policy(most_drafts)
        self.choice = OFF
        self._is_policys = False

    def choose(self, decoding: int, *, attached: bool) -> Choice:
        """The choice for the next step, with so many requests past their prefill."""
        setting = self.setting  # once: another thread changes it
        self._is_policys = setting == "auto" and attached
        if not attached or setting == "off":
            self.choice = OFF
        elif setting == "auto":
            self.choice = self.policy.choose(decoding)
        else:
            self.choice = Choice(Mode(setting), self.most_drafts)
        return self.choice

    def interrupted(self) -> None:
        """The target made a step with prefill."""
        if self._is_policys:
            self.policy.interrupted()

    def stepped(self, step: Step) -> None:
        """The target made a decode step without prefill."""
        if self._is_policys:
            self.policy.stepped(step)
