"""``minedraft serve``: its flags, and the environment that vLLM's processes inherit."""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from minedraft import lifeline
from minedraft.commands.common import ENGINE_FLAGS, Commands, add_drafter, add_options
from minedraft.config import ENV_CONTROL, ENV_METRICS, ConfigError, check_num_speculative_tokens
from minedraft.verifier import contract

AGAIN_S = 15
"""Longer than an orderly end takes."""


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a target with the OpenAI API and a drafter beside it",
        epilog=ENGINE_FLAGS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="the model whose output you get")
    add_drafter(parser)
    add("--trace", metavar="FILE", help="write a trace that Perfetto opens (ui.perfetto.dev)")
    add_options(parser)
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    check_num_speculative_tokens(options.num_speculative_tokens)
    if options.mode == "off" and options.trace:
        raise ConfigError("--trace: stock vLLM writes none; leave it out, or take another --mode")
    signal.signal(signal.SIGTERM, _interrupt)
    if options.mode == "off":
        from minedraft.serve import run_stock

        return run_stock(options)
    contract.ensure()
    with tempfile.TemporaryDirectory(prefix="minedraft-", ignore_cleanup_errors=True) as folder:
        os.environ.update(_environment(Path(folder)))
        # Not before: prometheus_client looks for the folder when it is imported, as vLLM does.
        from minedraft.serve import run

        return run(options, Path(folder))


def _interrupt(*_: Any) -> NoReturn:
    """Until vLLM handles the signal. While it starts it may lose it, so it is sent again."""
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.alarm(AGAIN_S)
    raise KeyboardInterrupt


def _environment(folder: Path) -> dict[str, str]:
    """For all processes of the server; what the user set stays as it is."""
    variables = lifeline.family(folder)
    for name, part in ((ENV_CONTROL, "control"), (ENV_METRICS, "metrics")):
        if not os.environ.get(name):
            (folder / part).mkdir(mode=0o700)
            variables[name] = str(folder / part)
    return variables
