"""What the commands share: the flags that several of them take.

Flags of our own are parsed first, without vLLM, whose import takes seconds; all others are vLLM
engine flags and go to vLLM's own parser, which refuses what it does not know.
"""

import argparse
from typing import get_args

from minedraft.config import DEFAULT_NUM_SPECULATIVE_TOKENS, MineDraftConfig, Mode

Commands = argparse._SubParsersAction
ENGINE_FLAGS = "Any other flag is a vLLM engine flag: see `vllm serve --help=all`."


def add_drafter(parser: argparse.ArgumentParser) -> None:
    """The drafter and where it runs."""
    add = parser.add_argument
    add("--draft-model", metavar="DRAFT", help="the drafter, started on a device of its own")
    add("--drafter", metavar="ADDRESS", help="instead: a running `minedraft drafter`")
    add("--key-file", metavar="FILE", help="its key file, for a tcp:// address")
    add_places(parser)


def add_places(parser: argparse.ArgumentParser) -> None:
    """Where target and drafter run, and the drafter's engine."""
    add = parser.add_argument
    add("--target-cores", metavar="CPUS", help="CPU cores of the target, as in 0-3,8")
    add("--drafter-cores", metavar="CPUS", help="CPU cores of the drafter")
    add("--drafter-gpu", metavar="GPU", help="GPU of the drafter, from CUDA_VISIBLE_DEVICES")
    add("--drafter-args", default="", metavar="'FLAGS'", help="vLLM engine flags of the drafter")


def add_options(parser: argparse.ArgumentParser) -> None:
    """How the verifier works with its drafter."""
    add = parser.add_argument
    defaults, descriptions = MineDraftConfig(), MineDraftConfig.descriptions()
    add("--mode", choices=get_args(Mode), default=defaults.mode,
        help=f"{descriptions['mode']}; off: stock vLLM (default: %(default)s)")  # fmt: skip
    add("--num-speculative-tokens", type=int, default=DEFAULT_NUM_SPECULATIVE_TOKENS, metavar="K",
        help="draft tokens for each verification, at most (default: %(default)s)")  # fmt: skip
    for name, text in descriptions.items():
        if name != "mode":
            _add_option(parser, name, getattr(defaults, name), text)


def _add_option(parser: argparse.ArgumentParser, name: str, default: object, text: str) -> None:
    """A flag for an option of MineDraftConfig."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(default, bool):
        parser.add_argument(flag, action="store_true", help=text)
    else:
        # Of a Literal these are its values, of anything else there are none.
        choices = get_args(MineDraftConfig.type_of(name)) or None
        parser.add_argument(
            flag,
            type=type(default),
            choices=choices,
            default=default,
            help=f"{text} (default: {default})",
        )
