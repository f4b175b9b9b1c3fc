"""``minedraft demo``: it has no flags."""

import argparse

from minedraft.commands.common import Commands
from minedraft.config import ConfigError
from minedraft.verifier import contract


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "demo", help="plain, sequential and overlapped decoding of the same prompts, side by side"
    )
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    if options.engine_flags:
        raise ConfigError(f"demo takes no flags: {' '.join(options.engine_flags)}")
    contract.ensure()
    from minedraft.demo.run import demo

    return demo()
