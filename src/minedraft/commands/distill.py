"""``minedraft distill``: its flags."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from minedraft.commands.common import ENGINE_FLAGS, Commands, add_places
from minedraft.config import ConfigError
from minedraft.distill import checkpoint
from minedraft.distill.recipe import Recipe, RunFolder
from minedraft.verifier import contract

_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Recipe)}


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "distill",
        help="make a drafter for a target, from your prompts",
        description="The target answers prompts; a student, made of some of its layers or of a "
        "small model of the same tokenizer, learns from the answers; then it is measured. After "
        "Ctrl-C, or a crash, the same command goes on where it was.",
        epilog=ENGINE_FLAGS + " They are those of the target.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="a folder, or a name of Hugging Face's")
    add("--out", type=Path, required=True, metavar="DIR", help="the run's folder; the drafter is "
        "in DIR/drafter")  # fmt: skip
    _add_data(parser)
    _add_student(parser)
    _add_training(parser)
    _add_evaluation(parser)
    parser.set_defaults(run=_distill)


def _number(parser: argparse.ArgumentParser, name: str, text: str, kind: Any = int) -> None:
    default = _DEFAULTS[name]
    flag = f"--{name.replace('_', '-')}"
    help_text = f"{text} (default: {default:g})"
    parser.add_argument(flag, type=kind, default=default, metavar="N", help=help_text)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompts", nargs="+", default=[], metavar="FILE",
        help="JSONL files, sharegpt or humaneval: first turns, for the target to answer"
        )  # fmt: skip
    add("--transcripts", nargs="+", default=[], metavar="FILE",
        help='JSONL files of {"messages": [...]}, of which the last is the answer')  # fmt: skip
    add("--answers-of", type=Path, metavar="DIR",
        help="an earlier run with the same target and prompts, whose answers are used")  # fmt: skip
    add("--tokens", type=int, default=0, metavar="N",
        help="the target writes about so many, and no more (default: all prompts)")  # fmt: skip
    _number(parser, "max_prompts", "of each of these, drawn by the seed; 0: all")
    _number(parser, "max_prompt_tokens", "longer prompts are left out")
    _number(parser, "answer_tokens", "an answer ends there")
    _number(parser, "samples", "answers to each prompt at temperature 1, beside the greedy one")
    _number(parser, "held_out", "prompts of the first file, not trained on")
    _number(parser, "seed", "of draws and training")


def _add_student(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-layers", type=int, metavar="N",
        help="the student is so many layers of the target, the first and the last")  # fmt: skip
    add("--layers", metavar="LIST", help="or these of its layers, as in 0,1,15,29")
    add("--student", default="", metavar="MODEL", help="or a small model of the same tokenizer")
    _number(parser, "lora_rank", "of adapters for --student, in place of all weights; 0: none")
    add("--train-embeddings", action="store_true", help="and the output layer; both are frozen "
        "otherwise")  # fmt: skip
    add("--quantise", choices=["int8"], default="", help="in the end, weights and activations of "
        "8 bits")  # fmt: skip


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--minutes", type=float, default=0.0, metavar="M",
        help="of training at most (default: all epochs)")  # fmt: skip
    _number(parser, "epochs", "times that all answers are learned from")
    _number(parser, "learning_rate", "at its highest", float)
    _number(parser, "batch_tokens", "of a step, prompts included")
    _number(parser, "loss_vocabulary", "tokens that the loss tells apart")


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--no-run", action="store_true", help="no run of target and drafter together in the end")
    add("--concurrency", type=int, default=4, metavar="N",
        help="requests at a time in that run (default: %(default)s)")  # fmt: skip
    add_places(parser)


def _distill(options: argparse.Namespace) -> int:
    recipe = _recipe(options)
    recipe.check()
    for name in ("minutes", "tokens"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name}: give 0 or more")
    if options.concurrency < 1:
        raise ConfigError("--concurrency: give 1 or more")
    contract.ensure()
    from minedraft.distill.session import Limits, Session
    from minedraft.engine_options import parse_flags

    program = "minedraft distill"
    engine = parse_flags(options.engine_flags, program=program)
    args = options.drafter_args or shlex.join(options.engine_flags)
    session = Session(
        recipe,
        RunFolder(options.out),
        Limits(options.minutes, options.tokens),
        engine,
        parse_flags(shlex.split(args), program=f"{program} --drafter-args"),
        None if options.no_run else _pair(options, engine, args),
        options.concurrency,
        RunFolder(options.answers_of) if options.answers_of else None,
    )
    session.run()
    return 0


def _recipe(options: argparse.Namespace) -> Recipe:
    given = {name: getattr(options, name) for name in _DEFAULTS if hasattr(options, name)}
    given |= {name: tuple(given[name]) for name in ("prompts", "transcripts")}
    given["layers"] = _layers(options)
    return Recipe(**given)


def _layers(options: argparse.Namespace) -> tuple[int, ...]:
    if options.layers and options.num_layers is not None:
        raise ConfigError("give one of --layers and --num-layers")
    if options.num_layers is not None:
        total = checkpoint.num_layers(checkpoint.local_folder(options.target))
        return checkpoint.outer_layers(total, options.num_layers)
    try:
        return tuple(int(word) for word in (options.layers or "").split(",") if word.strip())
    except ValueError as error:
        raise ConfigError(f"--layers {options.layers}: give numbers, as in 0,1,15,29") from error


def _pair(
    options: argparse.Namespace, engine: dict[str, Any], drafter_args: str
) -> Callable[[Path, Path], Any]:
    """Of target and drafter, on devices that are there. Raises ConfigError if they are not."""
    from minedraft import beside
    from minedraft.bench.systems import Pair

    wish = beside.DrafterOptions.of(options, draft_model=str(options.out))
    placement = beside.place(wish, engine)
    return lambda target, drafter: Pair(
        str(target), str(drafter), placement, engine, drafter_args=drafter_args
    )
