"""What a run says of its drafter: a table, a plot, the model card."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minedraft.bench.markdown import grid, number, share
from minedraft.bench.plots import save
from minedraft.distill.evaluation import Evaluation, Line, OnText, best, lines
from minedraft.distill.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MS = 1e3
SHOWN_DRAFTS = 4
"""K of the one number in words."""


def table(found: Evaluation) -> str:
    """The table of K, in Markdown."""
    columns = ["K", "tokens per verification", "at temperature 1"]
    if found.machine:
        columns += ["V ms", "t ms", "expected tokens/s", "measured tokens/s", "per verification"]
    return grid(columns, [_row(line, found) for line in lines(found)], text_columns=0)


def _row(line: Line, found: Evaluation) -> list[str]:
    def cell(value: float | None, scale: float = 1.0) -> str:
        return "" if value is None else number(scale * value)

    row = [str(line.num_drafts), cell(line.greedy), cell(line.sampled)]
    if found.machine:
        row += [cell(line.verify_s, MS), cell(line.draft_s, MS)]
        row += [cell(line.expected_tokens_per_s), cell(line.measured_tokens_per_s)]
        row.append(cell(found.machine.tokens_per_verification.get(line.num_drafts)))
    return row


def summary(found: Evaluation) -> str:
    """In words: how good it is, and which K pays."""
    said = [f"On held-out text: {_of_text(found.greedy, 'answers')}"]
    if found.sampled:
        said.append(_of_text(found.sampled, "answers at temperature 1"))
    text = "; ".join(said) + "."
    if machine := found.machine:
        line = best(lines(found))
        expected = line.expected_tokens_per_s or 0.0
        fastest = max(machine.overlap_tokens_per_s.items(), key=lambda item: item[1])
        plain = machine.plain_tokens_per_s
        t1_ms = MS * min(t / k for k, t in machine.draft_s.items())
        text += (
            f" On {machine.devices}, {machine.concurrency} requests at a time: a draft step takes "
            f"{number(t1_ms)} ms, a plain step of the target {number(MS * machine.plain_step_s)} "
            f"ms. K = {line.num_drafts} is expected to give the most, {number(expected)} tokens/s; "
            f"of those that were run K = {fastest[0]} gave {number(fastest[1])}, and plain "
            f"decoding on the target's devices alone {number(plain)}."
        )
        if fastest[1] <= plain:
            text += " Here drafting does not pay."
    if found.unquantised:
        text += f"\n\nBefore quantising: {summary(found.unquantised)}"
    return text


def _of_text(found: OnText, what: str) -> str:
    return (
        f"{share(found.agreement)} of the tokens of {found.answers} {what} are the drafter's first "
        f"choice, {number(found.tokens_per_verification[SHOWN_DRAFTS - 1])} tokens per "
        f"verification at K = {SHOWN_DRAFTS}"
    )


def model_card(recipe: Recipe, found: Evaluation, trained: dict[str, Any], command: str) -> str:
    """README.md of the drafter."""
    base = f"layers {', '.join(map(str, recipe.layers))} of it" if recipe.layers else recipe.student
    learned = (
        f"adapters of rank {recipe.lora_rank}, merged in"
        if recipe.lora_rank
        else "all weights"
        if recipe.train_embeddings
        else "all weights but embeddings and output layer"
    )
    sources = ", ".join(Path(name).name for name in (*recipe.prompts, *recipe.transcripts))
    facts = [
        f"- Target: `{_name(recipe.target)}`. It drafts for this model and no other.",
        f"- Begun as {base}; {learned} learned. Weights: {recipe.quantise or 'not quantised'}.",
        f"- Learned from {trained['answers']:,} answers of the target ({trained['distinct']:,} "
        f"tokens) to prompts of {sources}: {trained['tokens']:,} tokens seen in "
        f"{trained['seconds'] / 60:.0f} minutes, by the Kullback-Leibler divergence from the "
        "target's distribution.",
        f"- {trained['held_out']} prompts were held out.",
        f"- Made by `{command}`; seed {recipe.seed}.",
    ]
    front = f"---\nbase_model: {_name(recipe.target)}\ntags: [speculative-decoding, drafter]\n---"
    parts = [
        front,
        "# A drafter for speculative decoding",
        "\n".join(facts),
        "## How good it is",
        summary(found),
        table(found),
        "*Tokens per verification* by where the drafter's first choice is the target's token; *V* "
        "and *t* for half of the requests; *expected* by inequality 2.6 of MineDraft (arXiv "
        "2603.18016), *per verification* tokens in the run. What was not run is interpolated.",
    ]
    return "\n\n".join(parts) + "\n"


def _name(model: str) -> str:
    return Path(model).name if Path(model).exists() else model


def draw(found: Evaluation, stem: Path) -> list[Path]:
    """Writes STEM-drafts.png and .svg. Raises ConfigError."""
    return save(lambda: _figure(found, lines(found)), stem, "drafts")


def _figure(found: Evaluation, rows: Sequence[Line]) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8 if found.machine else 4.5, 3.5), layout="constrained")
    both = figure.subplots(1, 2 if found.machine else 1, squeeze=False)[0]
    drafts = [line.num_drafts for line in rows]
    both[0].plot(drafts, [line.greedy for line in rows], "o-", label="greedy")
    if found.sampled:
        both[0].plot(drafts, [line.sampled for line in rows], "s--", label="temperature 1")
    both[0].set_ylabel("tokens per verification")
    if machine := found.machine:
        both[1].plot(drafts, [line.expected_tokens_per_s for line in rows], "-", label="expected")
        measured = machine.overlap_tokens_per_s
        both[1].plot(list(measured), list(measured.values()), "o", label="measured, overlapped")
        both[1].axhline(machine.plain_tokens_per_s, color="black", label="plain vLLM")
        both[1].set_ylabel("output tokens/s")
    for axes in both:
        axes.set_xlabel("draft tokens K")
        axes.set_xticks(drafts)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
