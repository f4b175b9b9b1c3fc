"""How good a drafter is: on held-out answers, and in a real run beside its target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from minedraft.bench import records
from minedraft.bench.offline import Offline, Plan
from minedraft.bench.provenance import provenance
from minedraft.bench.records import Benchmark, Load, System
from minedraft.bench.summary import Spread, summarize
from minedraft.bench.systems import Pair
from minedraft.bench.workloads import Conversation
from minedraft.config import ConfigError
from minedraft.distill import answers
from minedraft.distill.acceptance import MOST_DRAFTS, agreement, tokens_per_verification
from minedraft.distill.answers import GREEDY, Answer
from minedraft.distill.messages import Job, Text

RUN_DRAFTS = (1, 2, 4, 8)
"""K of the real runs; what is between is interpolated."""
RUN_REPETITIONS = 3
RUN_ROUNDS = 2
RUN_OUTPUT_TOKENS = 48


class OnText(msgspec.Struct):
    """What held-out answers of one kind say."""

    answers: int
    tokens: int
    agreement: float
    """Share of the tokens that the drafter finds most likely too."""
    tokens_per_verification: list[float]
    """For K = 1 to MOST_DRAFTS."""


class OnMachine(msgspec.Struct):
    """What a real run says. Seconds and tokens/s are medians."""

    devices: str
    concurrency: int
    plain_tokens_per_s: float
    plain_step_s: float
    overlap_tokens_per_s: dict[int, float]
    """By K, as the next two."""
    verify_s: dict[int, float]
    """V of half of the requests."""
    draft_s: dict[int, float]
    """t for half of the requests."""
    tokens_per_verification: dict[int, float]


class Evaluation(msgspec.Struct):
    """All of it."""

    greedy: OnText
    """Or of transcripts, however they were made."""
    sampled: OnText | None
    """At temperature 1; None where no such answers were made."""
    machine: OnMachine | None
    """None where no run was wanted."""
    unquantised: "Evaluation | None" = None
    """The same before the weights were quantised."""


def judge_job(
    drafter: Path, held_out: Sequence[Answer], folder: Path, engine: dict[str, Any]
) -> Job:
    """Has the drafter say what it finds most likely at each token of these answers."""
    texts = [Text(a.question, a.sample, a.prompt.tolist(), a.tokens.tolist()) for a in held_out]
    return Job(model=str(drafter), engine=engine, folder=str(folder), top=1, texts=texts)


def on_text(judged: Sequence[Answer]) -> OnText:
    """Of answers that the drafter judged."""
    alike = [(a.top_ids[:, 0] == a.tokens).tolist() for a in judged]
    return OnText(
        len(judged),
        sum(map(len, alike)),
        agreement(alike),
        [tokens_per_verification(alike, k) for k in range(1, MOST_DRAFTS + 1)],
    )


def on_texts(folder: Path) -> tuple[OnText, OnText | None]:
    """Of the greedy answers in a folder, and of those at temperature 1."""
    judged = list(answers.read(folder))
    sampled = [a for a in judged if a.sample != GREEDY]
    greedy = on_text([a for a in judged if a.sample == GREEDY])
    return greedy, on_text(sampled) if sampled else None


def run(
    pair: Pair, conversations: Sequence[Conversation], concurrency: int, seed: int, say: Any
) -> tuple[OnMachine, Benchmark]:
    """Plain and overlapped decoding of these conversations with the pair, greedily."""
    plan = Plan(
        pair,
        [System("plain", "target"), *(System("overlap", "all", k) for k in RUN_DRAFTS)],
        [Load(concurrency=concurrency)],
        conversations,
        RUN_REPETITIONS,
        seed,
        temperature=0.0,
        settle_s=0.0,
        most_loaded=2,
        rounds=RUN_ROUNDS,
    )
    benchmark = Benchmark(records.VERSION, "distill", provenance(), pair.devices(), [])
    with Offline(plan, say) as bench:
        bench.load()
        bench.run(benchmark.runs.append)
    plain, *ours = summarize(benchmark)
    by_drafts = {summary.setting.system.num_drafts: summary for summary in ours}
    return OnMachine(
        pair.devices()["all"],
        concurrency,
        plain.tokens_per_s.median,
        _median(plain.measures.verify_s),
        {k: s.tokens_per_s.median for k, s in by_drafts.items()},
        {k: _median(s.measures.verify_s) for k, s in by_drafts.items()},
        {k: _median(s.measures.draft_s) for k, s in by_drafts.items()},
        {
            k: s.acceptance.tokens_per_verification
            for k, s in by_drafts.items()
            if s.acceptance is not None
        },
    ), benchmark


def _median(found: Spread | None) -> float:
    if not found or not found.median > 0:
        raise ConfigError("the run measured neither V nor t; give --no-run, and minedraft bench")
    return found.median


class Line(msgspec.Struct):
    """What K draft tokens give."""

    num_drafts: int
    greedy: float
    """Tokens per verification on held-out text."""
    sampled: float | None
    verify_s: float | None = None
    draft_s: float | None = None
    expected_tokens_per_s: float | None = None
    """By inequality 2.6 of MineDraft (arXiv 2603.18016), from the three above."""
    measured_tokens_per_s: float | None = None


def lines(found: Evaluation) -> list[Line]:
    """For each K."""
    made = []
    for k in range(1, MOST_DRAFTS + 1):
        sampled = found.sampled.tokens_per_verification[k - 1] if found.sampled else None
        line = Line(k, found.greedy.tokens_per_verification[k - 1], sampled)
        if machine := found.machine:
            line.verify_s = _between(machine.verify_s, k)
            line.draft_s = _between(machine.draft_s, k)
            # Each half is verified once in the time of two steps.
            step_s = max(line.verify_s, line.draft_s)
            line.expected_tokens_per_s = machine.concurrency * line.greedy / (2 * step_s)
            line.measured_tokens_per_s = machine.overlap_tokens_per_s.get(k)
        made.append(line)
    return made


def best(found: Sequence[Line]) -> Line:
    """The K with the highest expected speed; without a run, with the most per verification."""
    if found[0].expected_tokens_per_s is None:
        return max(found, key=lambda line: line.greedy)
    return max(found, key=lambda line: line.expected_tokens_per_s or 0.0)


def _between(measured: dict[int, float], num_drafts: int) -> float:
    known = sorted(measured)
    return float(np.interp(num_drafts, known, [measured[k] for k in known]))
