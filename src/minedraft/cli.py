"""The command ``minedraft``. Thin: a subcommand parses its flags and calls one function.

Flags of our own are parsed first, without vLLM, whose import takes seconds; all others are vLLM
engine flags and go to vLLM's own parser, which refuses what it does not know.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from minedraft import devices
from minedraft.config import ConfigError, MineDraftConfig, check_num_speculative_tokens
from minedraft.drafter.child import DrafterError
from minedraft.placement import parse_cores
from minedraft.verifier import contract

PROGRAM = "minedraft"
DEFAULT_NUM_SPECULATIVE_TOKENS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; what the user can mend is said in one line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Overlapped speculative decoding for stock vLLM.",
        epilog=f"`{PROGRAM} COMMAND --help` shows the flags of a command.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_generate(commands)
    _add_drafter(commands)
    _add_demo(commands)
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


Commands = argparse._SubParsersAction
ENGINE_FLAGS = "Any other flag is a vLLM engine flag: see `vllm serve --help=all`."


def _add_generate(commands: "Commands[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate", help="answer a file of prompts", epilog=ENGINE_FLAGS, allow_abbrev=False
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="the model whose output you get")
    add("--draft-model", metavar="DRAFT", help="the drafter, started on a device of its own")
    add("--drafter", metavar="ADDRESS", help="instead: a running `minedraft drafter`")
    add("--key-file", metavar="FILE", help="its key file, for a tcp:// address")
    add("--prompts", required=True, type=Path, metavar="FILE.jsonl",
        help='a line: {"prompt": ...} or {"messages": [...]}, "sampling": {...}')  # fmt: skip
    add("--output", required=True, type=Path, metavar="OUT.jsonl", help="one answer a line")
    add("--stats", type=Path, metavar="STATS.json", help="the verifier's measurements")
    add("--mode", choices=("overlap", "sequential", "off"), default="overlap",
        help="off: stock vLLM without drafts (default: %(default)s)")  # fmt: skip
    add("--num-speculative-tokens", type=int, default=DEFAULT_NUM_SPECULATIVE_TOKENS, metavar="K",
        help="draft tokens for each verification, at most (default: %(default)s)")  # fmt: skip
    defaults = MineDraftConfig()
    for name, text in MineDraftConfig.descriptions().items():
        if name != "mode":
            _add_option(parser, name, getattr(defaults, name), text)
    add("--target-cores", metavar="CPUS", help="CPU cores of the target, as in 0-3,8")
    add("--drafter-cores", metavar="CPUS", help="CPU cores of the drafter")
    add("--drafter-gpu", metavar="GPU", help="GPU of the drafter, from CUDA_VISIBLE_DEVICES")
    add("--drafter-args", default="", metavar="'FLAGS'", help="vLLM engine flags of the drafter")
    parser.set_defaults(run=_generate)


def _add_option(parser: argparse.ArgumentParser, name: str, default: object, text: str) -> None:
    """A flag for an option of MineDraftConfig."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(default, bool):
        parser.add_argument(flag, action="store_true", help=text)
    else:
        kind = type(default)
        parser.add_argument(flag, type=kind, default=default, help=f"{text} (default: {default})")


def _generate(options: argparse.Namespace) -> int:
    check_num_speculative_tokens(options.num_speculative_tokens)
    if options.mode != "off":
        contract.ensure()
    from minedraft import offline

    return offline.generate(options)


def _add_drafter(commands: "Commands[argparse.ArgumentParser]") -> None:
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


def _add_demo(commands: "Commands[argparse.ArgumentParser]") -> None:
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
