"""``minedraft demo``: its flags."""

import argparse
from pathlib import Path

from minedraft.commands.common import Commands
from minedraft.config import ConfigError
from minedraft.verifier import contract


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "demo", help="plain, sequential and overlapped decoding of the same prompts, side by side"
    )
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE.svg", help="a picture of the overlapped run"
    )
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    if options.engine_flags:
        raise ConfigError(f"demo does not know {' '.join(options.engine_flags)}")
    contract.ensure()
    from minedraft.demo.run import demo

    return demo(options.timeline)
