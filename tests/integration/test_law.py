"""Sampled output with drafts follows the target's law, whatever the drafter proposes.

For each prompt the law of the three tokens that follow is computed exactly from a Transformers
forward pass, and 3,000 sampled texts are held against it by a chi-square test. The significance
level of each of the nine tests is 1e-5, so together they raise a false alarm in fewer than one run
in ten thousand. On Model Runner V2, which is slow here, one of them runs, with 200 texts of two
tokens: that sees a temperature of 0.9 in place of 0.6, but not one of 0.7.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import interpreter
import pytest
import torch
from drafters import Reference
from engines import Bench, bench, run, scheduler_of
from scipy.stats import chi2
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

SAMPLES, LENGTH = (200, 2) if interpreter.is_wanted() else (3000, 3)
SIGNIFICANCE = 1e-5
FEWEST_EXPECTED = 8.0
PROMPT = [14, 5, 33, 40, 21, 9]
V2 = pytest.mark.runner_v2
SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top-k": {"temperature": 1.3, "top_k": 4},
    "top-p": {"temperature": 0.9, "top_p": 0.6},
}


@pytest.fixture(scope="module")
def both(
    tiny: Any, tmp_path_factory: pytest.TempPathFactory, scheduling: dict[str, Any]
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("drafter")
    with bench(tiny, folder, max_num_seqs=128, **scheduling) as engines:
        yield engines


def next_law(target: Reference, tokens: list[int], sampling: dict[str, Any]) -> torch.Tensor:
    """float64 [vocabulary]: the law of the token after these, as vLLM defines top-k and top-p."""
    logits = target.logits(tokens).double() / sampling["temperature"]
    if "top_k" in sampling:
        logits[logits < logits.topk(sampling["top_k"]).values[-1]] = -torch.inf
    law = logits.softmax(-1)
    if "top_p" in sampling:
        ordered, order = law.sort()
        drop = order[ordered.cumsum(0) <= 1 - sampling["top_p"]]
        law[drop] = 0
        law /= law.sum()
    return law


def text_law(target: Reference, sampling: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The law of the texts; those less likely than a sample can show are left to the rest."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, weight in laws.items():
            if weight * SAMPLES < FEWEST_EXPECTED:
                continue
            law = next_law(target, [*PROMPT, *text], sampling)
            for token in law.nonzero().flatten().tolist():
                longer[(*text, token)] = weight * float(law[token])
        laws = longer
    return {text: p for text, p in laws.items() if p * SAMPLES >= FEWEST_EXPECTED}


def p_value(law: dict[tuple[int, ...], float], seen: Counter[tuple[int, ...]]) -> float:
    """Of the chi-square test over the likely texts and one cell for all others."""
    total = seen.total()
    expected = [p * total for p in law.values()]
    observed = [seen[text] for text in law]
    rest = total - sum(expected)
    if rest >= FEWEST_EXPECTED:
        expected.append(rest)
        observed.append(total - sum(observed))
    else:
        assert total - sum(observed) <= 30, "texts that the law hardly allows"
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return float(chi2.sf(statistic, len(expected) - 1))


def sample(llm: Any, sampling: dict[str, Any]) -> Counter[tuple[int, ...]]:
    params = SamplingParams(
        **sampling,
        n=SAMPLES,
        max_tokens=LENGTH + 2,  # drafts for the last of them too
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    (output,) = run(llm, [PROMPT], params)
    return Counter(tuple(completion.token_ids[:LENGTH]) for completion in output.outputs)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        pytest.param(name, drafter, marks=[V2] * ((name, drafter) == ("temperature", "perturbed")))
        for name in SAMPLINGS
        for drafter in ("perfect", "perturbed", "unrelated")
    ],
)
def test_the_law_of_sampled_texts(both: Bench, name: str, drafter: str) -> None:
    both.draft_with(drafter, 3)
    drafted = both.stats.drafted
    seen = sample(both.drafted, SAMPLINGS[name])
    assert both.stats.drafted - drafted >= LENGTH * SAMPLES, "hardly anything was drafted"
    law = text_law(both.target, SAMPLINGS[name])
    assert len(law) >= 5
    assert p_value(law, seen) > SIGNIFICANCE


def test_the_test_sees_a_wrong_temperature(both: Bench) -> None:
    both.draft_with("perturbed", 3)
    seen = sample(both.drafted, {"temperature": 0.7})
    assert p_value(text_law(both.target, SAMPLINGS["temperature"]), seen) < SIGNIFICANCE


def test_seeded_requests_are_drafted_only_when_asked(
    both: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.draft_with("perfect", LENGTH)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
    before = both.stats.drafted
    run(both.drafted, [PROMPT], params)
    assert both.stats.drafted == before
    monkeypatch.setattr(scheduler_of(both.drafted), "_draft_seeded", True)
    run(both.drafted, [PROMPT], params)
    assert both.stats.drafted > before
