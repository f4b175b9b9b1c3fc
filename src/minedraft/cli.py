"""The command ``minedraft``. Thin: a subcommand parses its flags and calls one function."""

import argparse
import os
import sys
from collections.abc import Sequence

from minedraft import devices
from minedraft.commands import bench, control, demo, distill, doctor, drafter, generate, serve
from minedraft.config import ConfigError
from minedraft.drafter.child import DrafterError

PROGRAM = "minedraft"
COMMANDS = (serve, generate, drafter, control, doctor, demo, bench, distill)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; what the user can mend is said in one line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Overlapped speculative decoding for stock vLLM.",
        epilog=f"`{PROGRAM} COMMAND --help` shows the flags of a command.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, engine_flags = parser.parse_known_args(words)
    options.engine_flags = engine_flags
    try:
        _preload_openmp(words)
        return int(options.run(options))
    except (ConfigError, DrafterError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        return 130


def _preload_openmp(words: Sequence[str]) -> None:
    """Starts this command anew under Intel's OpenMP where vLLM's CPU wheel brought it."""
    if variables := devices.openmp_preload():
        # -P: like the installed command, without the modules of the folder it is given in.
        command = [sys.executable, "-P", "-m", "minedraft", *words]
        os.execve(sys.executable, command, {**os.environ, **variables})
