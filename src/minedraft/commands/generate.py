"""``minedraft generate``: its flags."""

import argparse
from pathlib import Path

from minedraft.commands.common import ENGINE_FLAGS, Commands, add_drafter, add_options
from minedraft.config import check_num_speculative_tokens
from minedraft.verifier import contract


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "generate", help="answer a file of prompts", epilog=ENGINE_FLAGS, allow_abbrev=False
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="the model whose output you get")
    add_drafter(parser)
    add("--prompts", required=True, type=Path, metavar="FILE.jsonl",
        help='a line: {"prompt": ...} or {"messages": [...]}, "sampling": {...}')  # fmt: skip
    add("--output", required=True, type=Path, metavar="OUT.jsonl", help="one answer a line")
    add("--stats", type=Path, metavar="STATS.json", help="the verifier's measurements")
    add_options(parser)
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> int:
    check_num_speculative_tokens(options.num_speculative_tokens)
    if options.mode != "off":
        contract.ensure()
    from minedraft import offline

    return offline.generate(options)
