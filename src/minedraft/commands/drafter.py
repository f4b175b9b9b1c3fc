"""``minedraft drafter``: its flags."""

import argparse
import os

from minedraft import devices
from minedraft.commands.common import ENGINE_FLAGS, Commands
from minedraft.placement import parse_cores
from minedraft.verifier import contract


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "drafter",
        help="run a drafter that verifiers reach by its address",
        epilog=ENGINE_FLAGS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="DRAFT", help="the drafter's model")
    add("--listen", required=True, metavar="ADDRESS", help="ipc:///folder/name or tcp://host:port")
    add("--key-file", metavar="FILE", help="secret for tcp://, made if there is none")
    add("--cores", metavar="CPUS", help="CPU cores, as in 0-3,8")
    parser.set_defaults(run=_drafter)


def _drafter(options: argparse.Namespace) -> int:
    if options.cores:
        cores = parse_cores(options.cores)
        devices.keep_to(cores)
        os.environ.update(devices.cpu_environment(cores))
    contract.ensure()
    from minedraft.drafter.main import run

    return run(options)
