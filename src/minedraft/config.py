"""Every option of MineDraft, once.

Two places carry them. What belongs to the output or to the schedule stands in vLLM's
``additional_config["minedraft"]``; it is logged and enters vLLM's compile hash. What belongs to a
machine (addresses, keys, files) travels in environment variables, which child processes inherit.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

import msgspec

from minedraft.protocol import MAX_DRAFT_TOKENS

ADDITIONAL_CONFIG_KEY = "minedraft"
ENV_DRAFTER = "MINEDRAFT_DRAFTER"
ENV_KEY_FILE = "MINEDRAFT_KEY_FILE"
ENV_STATS = "MINEDRAFT_STATS"
ENV_TRACE = "MINEDRAFT_TRACE"
ENV_CONTROL = "MINEDRAFT_CONTROL"
"""A folder, of mode 0700, in which each engine listens for `minedraft control`."""
ENV_METRICS = "PROMETHEUS_MULTIPROC_DIR"
"""A folder in which processes leave their metrics, for the page /metrics of another one to show."""
DEFAULT_NUM_SPECULATIVE_TOKENS = 4

Mode = Literal["auto", "overlap", "sequential", "off"]
"""What an engine can be told; ``off``: no drafts."""
PadDrafts = Literal["auto", "always", "never"]


class ConfigError(ValueError):
    """An option that cannot be: one line that says what is wrong and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(line.strip() for line in text.splitlines()))


def _says(text: str, **bounds: Any) -> msgspec.Meta:
    """What an option does, for command lines and documentation, and its bounds."""
    return msgspec.Meta(description=text, **bounds)


class MineDraftConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the verifier works with its drafter."""

    mode: Annotated[
        Literal["auto", "overlap", "sequential"],
        _says(
            "overlap: half of the requests is verified while the drafter drafts for the other "
            "half; sequential: all are verified together, then all are drafted for; auto: one of "
            "these or no drafting, and how many draft tokens, by what is measured"
        ),
    ] = "auto"

    draft_seeded: Annotated[
        bool,
        _says(
            "draft also for requests with a seed and temperature > 0; their text keeps its law, "
            "but is another one than without drafts, and depends on when drafts arrive"
        ),
    ] = False

    max_wait_s: Annotated[
        float,
        _says(
            "longest wait for the drafts of a request, in seconds, before it is decoded without; "
            "the wait is twice the usual time of a draft, within the limits",
            gt=0,
            le=3600,
        ),
    ] = 2.0

    min_wait_s: Annotated[
        float, _says("the wait for drafts is never set below this, in seconds", ge=0, le=3600)
    ] = 0.02

    wait_for_first_drafts: Annotated[
        bool,
        _says(
            "wait also for the first drafts of a request; without, it is decoded plainly until "
            "the drafter has prefilled its prompt"
        ),
    ] = False

    pad_drafts: Annotated[
        PadDrafts,
        _says(
            "a full CUDA graph wants as many draft tokens of each request: short drafts are padded "
            "with tokens that are verified like others and not counted; auto: where vLLM uses full "
            "CUDA graphs for decoding"
        ),
    ] = "auto"

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """What each option does."""
        hints = get_type_hints(cls, include_extras=True)
        return {name: str(hints[name].__metadata__[0].description) for name in hints}

    @classmethod
    def type_of(cls, name: str) -> Any:
        """The type of an option, without its bounds."""
        return get_type_hints(cls)[name]

    @classmethod
    def parse(cls, options: Any) -> Self:
        """The configuration in a mapping of options. Raises ConfigError."""
        try:
            config = msgspec.convert({} if options is None else options, cls)
        except msgspec.ValidationError as error:
            fields = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"minedraft options: {error}; the options are {fields}") from error
        if config.min_wait_s > config.max_wait_s:
            raise ConfigError(
                f"minedraft options: min_wait_s={config.min_wait_s} is above "
                f"max_wait_s={config.max_wait_s}; lower the first or raise the second"
            )
        return config

    def additional_config(self) -> dict[str, dict[str, Any]]:
        """What ``parse`` reads, as an entry of vLLM's additional_config."""
        return {ADDITIONAL_CONFIG_KEY: msgspec.to_builtins(self)}


class Endpoint(msgspec.Struct, frozen=True):
    """Where the drafter is, as the environment says it."""

    address: str
    key_file: str | None = None

    @classmethod
    def from_environment(cls) -> Self:
        """Reads MINEDRAFT_DRAFTER and MINEDRAFT_KEY_FILE. Raises ConfigError."""
        address = os.environ.get(ENV_DRAFTER)
        if not address:
            raise ConfigError(
                f"no drafter: set {ENV_DRAFTER} to the address of a running `minedraft drafter`"
            )
        return cls(address, os.environ.get(ENV_KEY_FILE) or None)

    def environment(self) -> dict[str, str]:
        """The variables that ``from_environment`` reads."""
        return {ENV_DRAFTER: self.address, ENV_KEY_FILE: self.key_file or ""}


def path_of_engine(path: str, engine: int) -> str:
    """Where an engine writes: the first where it was told, the others beside it."""
    file = Path(path)
    return str(file.with_stem(f"{file.stem}-{engine}")) if path and engine else path


def check_num_speculative_tokens(num: int) -> int:
    """``num`` if it can be drafted. Raises ConfigError."""
    if not 1 <= num <= MAX_DRAFT_TOKENS:
        raise ConfigError(
            f"--num-speculative-tokens {num}: give a number from 1 to {MAX_DRAFT_TOKENS}"
        )
    return num
