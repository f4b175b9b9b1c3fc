"""``minedraft bench``: its flags."""

import argparse
import shlex
import time
from pathlib import Path
from typing import Any

from minedraft.commands.common import ENGINE_FLAGS, Commands, add_places
from minedraft.config import ConfigError, check_num_speculative_tokens
from minedraft.verifier import contract

REPORT = "report"
REPETITIONS, QUICK_REPETITIONS = 5, 3
CONVERSATIONS, QUICK_CONVERSATIONS = 32, 4
OUTPUT_TOKENS, QUICK_OUTPUT_TOKENS = 128, 24
DRAFTS, QUICK_DRAFTS = (1, 2, 4), (2,)
CONCURRENCY, QUICK_CONCURRENCY = (1, 4, 8), (4,)
SETTLE_S, QUICK_SETTLE_S = 30.0, 10.0
DEMO_FLAGS = (
    "--dtype float32 --enforce-eager --max-model-len 2048 --no-enable-prefix-caching "
    "--kv-cache-memory-bytes 256M"
)


def add(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "bench",
        help="MineDraft beside vLLM's own ways, on the same devices and the same load",
        description="Measures plain vLLM, vLLM's own speculative decoding and MineDraft under the "
        "same load. Without TARGET: the demo models. `bench report A.json [B.json]` makes the "
        "report of a result again, or compares two.",
        epilog=ENGINE_FLAGS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="TARGET", help="the target, or: report A.json [B.json]")
    add("--draft-model", metavar="DRAFT", help="the drafter")
    add("--quick", action="store_true", help="smaller numbers below: ten minutes with the demo")
    add("--out", type=Path, metavar="FOLDER", help="for the results (default: bench-TIME)")
    _add_load(parser)
    _add_systems(parser)
    _add_devices(parser)
    add("--server", metavar="URL", help="measure this running server instead")
    add("--served-model", metavar="NAME", help="the model that it serves (default: TARGET)")
    parser.set_defaults(run=_bench)


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workload", default="sharegpt", metavar="NAME",
        help="sharegpt, humaneval or a JSONL file (default: %(default)s)")  # fmt: skip
    add("--conversations", type=int, metavar="N", help=_of(CONVERSATIONS, QUICK_CONVERSATIONS))
    add("--multi-turn", action="store_true", help="all turns, not the first alone")
    add("--concurrency", type=int, nargs="+", metavar="N",
        help="closed loop: requests at a time; " + _of(CONCURRENCY, QUICK_CONCURRENCY))  # fmt: skip
    add("--rate", type=float, nargs="+", metavar="R",
        help="open loop: requests a second, as a Poisson process")  # fmt: skip
    add("--output-tokens", type=int, metavar="N",
        help="of each answer, where the workload says none; "
        + _of(OUTPUT_TOKENS, QUICK_OUTPUT_TOKENS))  # fmt: skip
    add("--temperature", type=float, default=0.0, help="(default: 0, greedy)")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")


def _add_systems(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--systems", nargs="+", metavar="NAME", help="some of plain, ngram, draft_model, "
        "sequential, overlap, auto (default: all)")  # fmt: skip
    add("--num-speculative-tokens", type=int, nargs="+", metavar="K",
        help="every system is run with each; " + _of(DRAFTS, QUICK_DRAFTS))  # fmt: skip
    add("--no-bound", action="store_true", help="without the runs with drafts for nothing")
    add("--repetitions", type=int, metavar="N", help=_of(REPETITIONS, QUICK_REPETITIONS))
    add("--settle", type=float, metavar="S",
        help="seconds for `auto` to learn before it is measured; "
        + _of(SETTLE_S, QUICK_SETTLE_S))  # fmt: skip


def _add_devices(parser: argparse.ArgumentParser) -> None:
    add_places(parser)
    add = parser.add_argument
    add("--all-devices-args", default="", metavar="'FLAGS'",
        help="on GPUs: vLLM engine flags with which vLLM's own systems use the drafter's device "
        "too, such as a larger --tensor-parallel-size; without, they are run on the target's "
        "alone")  # fmt: skip
    add(
        "--most-loaded",
        type=int,
        metavar="N",
        help="engines loaded at a time, if there is memory (default: all on CPUs, 1 on GPUs)",
    )


def _of(usual: object, quick: object) -> str:
    def words(value: object) -> str:
        return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return f"(default: {words(usual)}; with --quick {words(quick)})"


def _bench(options: argparse.Namespace) -> int:
    if options.words[:1] == [REPORT]:
        return _report(options)
    if len(options.words) > 1:
        raise ConfigError(f"bench takes one target, not {' '.join(options.words)}")
    _fill(options)
    if options.server is not None:
        return _online(options)
    contract.ensure()
    return _offline(options)


def _fill(options: argparse.Namespace) -> None:
    """Numbers that were not given, and checks of those that were. Raises ConfigError."""
    numbers: dict[str, tuple[Any, Any]] = {
        "conversations": (CONVERSATIONS, QUICK_CONVERSATIONS),
        "output_tokens": (OUTPUT_TOKENS, QUICK_OUTPUT_TOKENS),
        "num_speculative_tokens": (DRAFTS, QUICK_DRAFTS),
        "repetitions": (REPETITIONS, QUICK_REPETITIONS),
        "settle": (SETTLE_S, QUICK_SETTLE_S),
    }
    if not options.concurrency and not options.rate:
        numbers["concurrency"] = (CONCURRENCY, QUICK_CONCURRENCY)
    for name, (usual, quick) in numbers.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    for name in ("conversations", "output_tokens", "repetitions"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: give 1 or more")
    for name in ("concurrency", "rate"):
        if any(not value > 0 for value in getattr(options, name) or ()):
            raise ConfigError(f"--{name}: give numbers above 0")
    for num_drafts in options.num_speculative_tokens:
        check_num_speculative_tokens(num_drafts)
    if options.temperature < 0:
        raise ConfigError("--temperature: give 0 or more")
    if options.out is None:
        options.out = Path(time.strftime("bench-%Y%m%d-%H%M%S"))


def _loads(options: argparse.Namespace) -> list[Any]:
    from minedraft.bench.records import Load

    closed = [Load(concurrency=n) for n in options.concurrency or ()]
    return closed + [Load(rate=rate) for rate in options.rate or ()]


def _conversations(options: argparse.Namespace) -> list[Any]:
    from minedraft.bench.workloads import Conversation, load

    drawn = load(
        options.workload,
        count=options.conversations,
        seed=options.seed,
        multi_turn=options.multi_turn,
    )
    return [Conversation(c.turns, c.output_tokens or options.output_tokens) for c in drawn]


def _title(options: argparse.Namespace, what: str) -> str:
    turns = "all turns" if options.multi_turn else "first turns"
    law = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    return (
        f"{what}: {options.conversations} conversations of {Path(options.workload).name} "
        f"({turns}), {law}"
    )


def _offline(options: argparse.Namespace) -> int:
    from minedraft.bench import systems
    from minedraft.bench.offline import Plan
    from minedraft.bench.session import Session

    names = systems.check_names(options.systems or systems.NAMES)
    conversations = _conversations(options)
    pair = _pair(options)
    drafts = sorted(set(options.num_speculative_tokens))
    chosen = systems.systems(
        names,
        drafts,
        all_devices=pair.on_cpu or bool(pair.all_devices),
        free=not options.no_bound and not options.temperature,
    )
    plan = Plan(
        pair,
        chosen,
        _loads(options),
        conversations,
        options.repetitions,
        options.seed,
        options.temperature,
        options.settle,
        options.most_loaded or (len(chosen) if pair.on_cpu else 1),
    )
    what = f"{Path(pair.target).name} with {Path(pair.draft_model).name}"
    Session(_title(options, what), pair.devices(), options.out).offline(plan)
    return 0


def _pair(options: argparse.Namespace) -> Any:
    """The models, and where they run; vLLM checks its flags."""
    from minedraft import beside
    from minedraft.bench.systems import Pair
    from minedraft.engine_options import parse_flags

    flags = list(options.engine_flags)
    target, draft_model = next(iter(options.words), None), options.draft_model
    if target is None:
        target, draft_model = _demo_pair(options)
        flags = shlex.split(DEMO_FLAGS) + flags
        options.drafter_args = options.drafter_args or DEMO_FLAGS
    if draft_model is None:
        raise ConfigError("give the drafter: --draft-model DRAFT")
    engine = parse_flags(flags, program="minedraft bench")
    wish = beside.DrafterOptions.of(options, draft_model=str(draft_model))
    return Pair(
        target=str(target),
        draft_model=str(draft_model),
        placement=beside.place(wish, engine),
        engine=engine,
        all_devices=parse_flags(
            shlex.split(options.all_devices_args), program="minedraft bench --all-devices-args"
        ),
        drafter_args=options.drafter_args,
    )


def _demo_pair(options: argparse.Namespace) -> tuple[Path, Path]:
    from minedraft.demo.models import DemoError, demo_pair

    if options.draft_model is not None:
        raise ConfigError(
            "give the target of this drafter: minedraft bench TARGET --draft-model ..."
        )
    try:
        return demo_pair(print)
    except DemoError as error:
        raise ConfigError(str(error)) from error


def _online(options: argparse.Namespace) -> int:
    from minedraft.bench import systems
    from minedraft.bench.records import System
    from minedraft.bench.session import Served, Session

    model = options.served_model or next(iter(options.words), None)
    if model is None:
        raise ConfigError("give the model that the server serves: --served-model NAME")
    if options.engine_flags:
        raise ConfigError(f"a running server has its flags: leave out {options.engine_flags[0]}")
    if len(options.systems or ()) != 1:
        raise ConfigError("say which system the server is: --systems with one of " + ", ".join(
            systems.NAMES))  # fmt: skip
    (name,) = systems.check_names(options.systems)
    drafts = 0 if name == "plain" else max(options.num_speculative_tokens)
    session = Session(_title(options, model), {"all": options.server}, options.out)
    session.online(
        Served(options.server, model, System(name, "all", drafts)),
        _loads(options),
        _conversations(options),
        repetitions=options.repetitions,
        seed=options.seed,
        temperature=options.temperature,
        output_tokens=options.output_tokens,
    )
    return 0


def _report(options: argparse.Namespace) -> int:
    from minedraft.bench import comparison, records
    from minedraft.bench.session import write_report

    files = [Path(word) for word in options.words[1:]]
    if len(files) not in {1, 2} or options.engine_flags:
        raise ConfigError("give one or two results: minedraft bench report A.json [B.json]")
    found = [records.read(file) for file in files]
    if len(found) == 1:
        folder = options.out or files[0].parent
        print(write_report(found[0], folder))  # noqa: T201
        return 0
    text = comparison.compare(*found)
    if options.out is None:
        print(text)  # noqa: T201
        return 0
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "comparison.md").write_text(text)
    except OSError as error:
        raise ConfigError(f"{options.out}: {error.strerror}") from error
    return 0
