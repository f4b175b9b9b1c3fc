"""The mode that is in force: as it was set, or as the policy chooses.

Plain Python, no vLLM.
"""

from typing import Literal

from minedraft.verifier.policy import OFF, Choice, Mode, Policy, Step

Setting = Literal["auto", "overlap", "sequential", "off"]


class Modes:
    """Decides for each step. ``setting`` and ``most_drafts`` may be changed at any time."""

    def __init__(self, setting: Setting, most_drafts: int) -> None:
        self.setting: Setting = setting
        self.most_drafts = most_drafts
        """Draft tokens for each verification, at most: K of the modes that are set."""
        self.policy = Policy(most_drafts)
        self.choice = OFF
        self._is_policys = False

    def choose(self, decoding: int, *, attached: bool) -> Choice:
        """The choice for the next step, with so many requests past their prefill."""
        self._is_policys = self.setting == "auto" and attached
        if self._is_policys:
            self.choice = self.policy.choose(decoding)
        elif not attached or self.setting in ("auto", "off"):
            self.choice = OFF
        else:
            self.choice = Choice(Mode(self.setting), self.most_drafts)
        return self.choice

    def stepped(self, step: Step) -> None:
        """The target made a decode step without prefill."""
        if self._is_policys:
            self.policy.stepped(step)
