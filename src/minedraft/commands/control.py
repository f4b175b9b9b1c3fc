"""``minedraft control``: its flags, and how the answers are shown."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minedraft.commands.common import Commands
from minedraft.config import ENV_CONTROL, ConfigError, Mode
from minedraft.control import Command, Status, ask, default_folder


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "control", help="show what a running server does, or change it", allow_abbrev=False
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, metavar="FOLDER",
        help=f"its control folder, as in {ENV_CONTROL} (default: that of your only "
             "`minedraft serve`)")  # fmt: skip
    add("--mode", choices=get_args(Mode), help="from the next step on")
    trace = parser.add_mutually_exclusive_group()
    trace.add_argument("--trace", type=Path, metavar="FILE",
                       help="write a trace that Perfetto opens (ui.perfetto.dev)")  # fmt: skip
    trace.add_argument("--no-trace", action="store_true", help="end the trace")
    add("--json", action="store_true", help="for machines")
    parser.set_defaults(run=_control)


def _control(options: argparse.Namespace) -> int:
    if options.engine_flags:
        raise ConfigError(f"control does not know {' '.join(options.engine_flags)}")
    folder = options.folder or default_folder()
    trace = str(options.trace.absolute()) if options.trace else None
    statuses = ask(folder, Command(options.mode, "" if options.no_trace else trace))
    if not statuses:
        raise ConfigError(f"no engine listens in {folder}; is the server up?")
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(statuses)).decode())  # noqa: T201
    else:
        Console().print(table(statuses))
    return 1 if any(status.error for status in statuses) else 0


def table(statuses: Sequence[Status]) -> Table:
    """A column for each engine, without the lines that say nothing."""
    view = Table(show_header=False)
    for name in Status.__struct_fields__:
        values = [getattr(status, name) for status in statuses]
        if any(value != "" for value in values):
            cells = [Text(str(value), "red" if name == "error" else "") for value in values]
            view.add_row(Text(name.replace("_", " "), "bold"), *cells)
    return view
