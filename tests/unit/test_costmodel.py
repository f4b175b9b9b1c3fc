"""V and t: curves that only rise, files that say what is wrong, fits that outliers do not spoil."""

import json
import math
import random
import runpy
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minedraft.config import ConfigError
from minedraft.costmodel.curve import MAX_COEFFICIENT_S, CostModel, Curve
from minedraft.costmodel.datasheet import (
    H100_SXM,
    L40S,
    LLAMA_3_1_8B,
    LLAMA_3_3_70B,
    QWEN3_0_6B,
    QWEN3_1_7B,
    QWEN3_4B,
    QWEN3_32B,
    ModelShape,
    derive,
)
from minedraft.costmodel.fit import Measurement, fit

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COEFFICIENTS = Curve.__struct_fields__[1:]

sizes = st.integers(0, 1_000_000)


def a_curve(**coefficients: float) -> Curve:
    return Curve(source="a test", **{**dict.fromkeys(COEFFICIENTS, 0.0), **coefficients})


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    values = st.floats(0, MAX_COEFFICIENT_S)
    return Curve(
        source=draw(st.text(min_size=1).filter(str.strip)),
        **{name: draw(values) for name in COEFFICIENTS},
    )


def one_line(raised: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


# --- curves ---------------------------------------------------------------------------------------


def test_the_slower_of_reading_weights_and_computing_counts() -> None:
    curve = a_curve(overhead_s=1, weights_s=10, per_token_s=2, per_request_s=0.5)
    assert curve.seconds(tokens=3, requests=2, context=0) == 1 + 10 + 1
    assert curve.seconds(tokens=6, requests=2, context=0) == 1 + 12 + 1
    curve = a_curve(weights_s=10, per_context_token_s=0.25)
    assert curve.seconds(tokens=3, requests=2, context=40) == 10 + 10


@given(curves(), st.tuples(sizes, sizes, sizes), st.tuples(sizes, sizes, sizes))
def test_more_of_anything_never_takes_less(
    curve: Curve, some: tuple[int, int, int], added: tuple[int, int, int]
) -> None:
    base = curve.seconds(*some)
    assert base >= curve.overhead_s + curve.weights_s
    for axis in range(3):
        more = list(some)
        more[axis] += added[axis]
        assert curve.seconds(*more) >= base


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf, MAX_COEFFICIENT_S * 1.01])
def test_coefficients_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=.*give seconds") as raised:
        a_curve(**{name: value})
    one_line(raised)


def test_a_curve_says_where_it_comes_from() -> None:
    with pytest.raises(ConfigError, match="^source is empty") as raised:
        msgspec.structs.replace(a_curve(), source=" ")
    one_line(raised)


@given(curves(), curves(), st.integers(1, 8), st.integers(1, 100), st.integers(0, 100_000))
def test_v_is_one_pass_and_t_a_pass_for_each_draft(
    target: Curve, drafter: Curve, num_drafts: int, requests: int, context: int
) -> None:
    pair = CostModel(version=1, name="a pair", target=target, drafter=drafter)
    verification = target.seconds(requests * (num_drafts + 1), requests, context)
    assert pair.verification_s(num_drafts, requests, context) == verification
    passes = (
        drafter.seconds(requests, requests, context + requests * drafted)
        for drafted in range(num_drafts)
    )
    assert pair.drafting_s(num_drafts, requests, context) == pytest.approx(sum(passes))
    assert pair.drafting_s(0, requests, context) == 0


# --- files ----------------------------------------------------------------------------------------


@given(st.text(), curves(), curves())
def test_a_file_is_read_as_it_was_written(name: str, target: Curve, drafter: Curve) -> None:
    pair = CostModel(version=1, name=name, target=target, drafter=drafter)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pair.json")
        pair.save(path)
        assert CostModel.load(path) == pair
        written = json.loads(path.read_text("utf-8"))
    assert {name for name in written["target"] if not name.endswith("_s")} == {"source"}


GOOD: dict[str, Any] = {
    "version": 1,
    "name": "a pair",
    "target": msgspec.to_builtins(a_curve(weights_s=0.02)),
    "drafter": msgspec.to_builtins(a_curve(weights_s=0.002)),
}


def changed(**changes: Any) -> str:
    return json.dumps(GOOD | changes)


def curve_with(**changes: Any) -> str:
    return changed(drafter=GOOD["drafter"] | changes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ("\xff", "malformed"),
        (changed(version=2), r"2 - at `\$\.version`"),
        (json.dumps({k: GOOD[k] for k in GOOD if k != "drafter"}), "required field `drafter`"),
        (json.dumps({k: GOOD[k] for k in GOOD if k != "version"}), "required field `version`"),
        (changed(speed=1), "unknown field `speed`"),
        (changed(name=None), r"`\$\.name`"),
        (changed(target="fast"), r"`\$\.target`"),
        (curve_with(weights_ms=1), r"unknown field `weights_ms` - at `\$\.drafter`"),
        (changed(drafter={"source": "a test"}), r"required field `.*` - at `\$\.drafter`"),
        (curve_with(weights_s=-0.5), r"weights_s=-0\.5: give seconds.*`\$\.drafter`"),
        (curve_with(per_token_s=math.nan), "malformed"),
        (curve_with(per_token_s=math.inf), "malformed"),
        (curve_with().replace("0.002", "1e999"), "malformed|out of range|weights_s=inf"),
        (curve_with(weights_s="0.5"), r"`\$\.drafter\.weights_s`"),
        (curve_with(weights_s=True), r"`\$\.drafter\.weights_s`"),
        (curve_with(weights_s=None), r"`\$\.drafter\.weights_s`"),
        (curve_with(source=""), r"source is empty.*`\$\.drafter`"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    text: str, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "pair.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"(?i)^cost model .*pair.json: .*({says})") as raised:
        CostModel.load(path)
    assert "it has the keys version (1)" in str(raised.value).replace(str(tmp_path), "")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="^cost model .*; give a JSON file$") as raised:
            CostModel.load(path)
        assert "\n" not in str(raised.value)


# --- fits -----------------------------------------------------------------------------------------


@st.composite
def realistic_curves(draw: st.DrawFn) -> Curve:
    """Weights in 0.1 to 50 ms, computing as long from 3 to 1000 tokens on."""
    weights_s = draw(st.floats(1e-4, 0.05))
    return a_curve(
        overhead_s=weights_s * draw(st.floats(0, 1)),
        weights_s=weights_s,
        per_token_s=weights_s / draw(st.floats(3, 1000)),
        per_request_s=weights_s * draw(st.floats(0, 0.001)),
        per_context_token_s=weights_s * draw(st.floats(1e-7, 1e-5)),
    )


def passes(rng: random.Random, number: int) -> list[tuple[int, int, int]]:
    requests = [rng.randint(1, 64) for _ in range(number)]
    return [(n * rng.randint(1, 8), n, n * rng.randint(1, 4000)) for n in requests]


def timed(curve: Curve, rng: random.Random, noise: float, outliers: float) -> list[Measurement]:
    """200 passes, a share of which took ten times too long."""
    return [
        Measurement(*sizes, curve.seconds(*sizes) * rng.gauss(1, noise) * (10 if spoilt else 1))
        for sizes in passes(rng, 200)
        for spoilt in [rng.random() < outliers]
    ]


def errors(fitted: Curve, true: Curve, rng: random.Random) -> list[float]:
    """At other passes than those that were measured."""
    return [abs(fitted.seconds(*p) / true.seconds(*p) - 1) for p in passes(rng, 100)]


@settings(max_examples=15, deadline=None)
@given(realistic_curves(), st.integers(0, 1000))
def test_a_known_curve_is_found(curve: Curve, seed: int) -> None:
    rng = random.Random(seed)
    found = fit(timed(curve, rng, noise=0, outliers=0), "a test")
    assert found.median_error < 0.005
    assert np.quantile(errors(found.curve, curve, rng), 0.9) < 0.02


@settings(max_examples=15, deadline=None)
@given(realistic_curves(), st.integers(0, 1000))
def test_passes_ten_times_too_long_do_not_spoil_the_fit(curve: Curve, seed: int) -> None:
    rng = random.Random(seed)
    found = fit(timed(curve, rng, noise=0.03, outliers=0.1), "a test")
    assert found.median_error < 0.04
    assert np.quantile(errors(found.curve, curve, rng), 0.9) < 0.05


def test_coefficients_are_found_one_by_one() -> None:
    curve = a_curve(
        overhead_s=0.004,
        weights_s=0.012,
        per_token_s=5e-5,
        per_request_s=2e-5,
        per_context_token_s=5e-8,
    )
    found = fit(timed(curve, random.Random(3), noise=0.01, outliers=0.1), "by hand").curve
    assert found.source == "by hand"
    for name in COEFFICIENTS:
        assert getattr(found, name) == pytest.approx(getattr(curve, name), rel=0.15), name


def test_what_cannot_be_told_apart_is_put_on_tokens_before_requests() -> None:
    rows = [Measurement(5 * n, n, 0, 0.001 + 0.0005 * n) for n in range(1, 65)]
    curve = fit(rows, "a test").curve
    assert curve.per_token_s == pytest.approx(0.0001, rel=0.01)
    assert curve.per_request_s == curve.per_context_token_s == curve.weights_s == 0


def test_passes_that_all_take_as_long_are_overhead() -> None:
    rows = [Measurement(n, 1, n, 0.02) for n in range(1, 20)]
    curve = fit(rows, "a test").curve
    assert curve.overhead_s == pytest.approx(0.02)
    assert curve == a_curve(overhead_s=curve.overhead_s)


measurements = st.builds(
    Measurement,
    st.integers(1, 10_000),
    st.integers(0, 1000),
    st.integers(0, 1_000_000),
    st.floats(1e-6, 10),
)


@settings(max_examples=15, deadline=None)
@given(st.lists(measurements, min_size=5, max_size=12))
def test_any_measurements_give_a_curve(rows: list[Measurement]) -> None:
    found = fit(rows, "a test")
    assert all(math.isfinite(residual) for residual in found.residuals)
    assert sum(int(row[1]) for row in found.table()[1:]) == len(rows)


def test_residuals_are_shown_by_tokens() -> None:
    curve = a_curve(overhead_s=0.01, per_token_s=1e-3)
    rows = [Measurement(n, 1, 0, curve.seconds(n, 1, 0)) for n in (1, 2, 3, 4, 6, 7, 8)]
    rows[3] = rows[3]._replace(seconds=2 * rows[3].seconds)
    found = fit(rows, "a test")
    assert found.residuals[3] == pytest.approx(1, abs=0.01)
    heading, *table = found.table()
    assert [row[:2] for row in table] == [
        ("1 to 1", "1"),
        ("2 to 3", "2"),
        ("4 to 7", "3"),
        ("8 to 8", "1"),
    ]
    assert dict(zip(heading, table[1], strict=True))["measured ms"] == "12.500"
    assert dict(zip(heading, table[1], strict=True))["residual"][1:] == "0.0%"


@pytest.mark.parametrize(
    "bad",
    [
        Measurement(0, 1, 1, 0.1),
        Measurement(1, -1, 1, 0.1),
        Measurement(1, 1, math.inf, 0.1),
        Measurement(1, 1, 1, 0),
        Measurement(1, 1, 1, -0.1),
        Measurement(1, 1, 1, math.nan),
        Measurement(math.nan, 1, 1, 0.1),
        Measurement(1, 1, 1, math.inf),
    ],
)
def test_measurements_that_cannot_be_are_refused(bad: Measurement) -> None:
    with pytest.raises(ConfigError, match="^Measurement.*cannot be: give") as raised:
        fit([*[Measurement(1, 1, 1, 0.1)] * 5, bad], "a test")
    one_line(raised)


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ConfigError, match="^4 measured passes are too few") as raised:
        fit([Measurement(1, 1, 1, 0.1)] * 4, "a test")
    one_line(raised)


# --- data sheets ----------------------------------------------------------------------------------

# hidden, intermediate, layers, heads, vocabulary, tied, norms of queries and keys: as in each
# config.json; then the parameters that the model card gives, in billions, and without embeddings.
CONFIGS = [
    (QWEN3_32B, 5120, 25600, 64, 64, 151936, False, True, 32.8, 31.2),
    (QWEN3_4B, 2560, 9728, 36, 32, 151936, True, True, 4.0, 3.6),
    (QWEN3_1_7B, 2048, 6144, 28, 16, 151936, True, True, 1.7, 1.4),
    (QWEN3_0_6B, 1024, 3072, 28, 16, 151936, True, True, 0.6, 0.44),
    (LLAMA_3_3_70B, 8192, 28672, 80, 64, 128256, False, False, 70.6, None),
    (LLAMA_3_1_8B, 4096, 14336, 32, 32, 128256, False, False, 8.03, None),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config[0].name)
def test_parameters_follow_from_the_configuration(config: Any) -> None:
    model, hidden, intermediate, layers, heads, vocabulary, tied, norms, card, inner = config
    attention = 2 * hidden * model.head_dim * (heads + model.kv_heads)
    small = 2 * hidden + (2 * model.head_dim if norms else 0)
    body = layers * (attention + 3 * hidden * intermediate + small) + hidden
    table = vocabulary * hidden
    assert (model.layers, model.parameters) == (layers, body + table)
    assert body + (table if tied else 2 * table) == pytest.approx(card * 1e9, rel=0.015)
    assert inner is None or body == pytest.approx(inner * 1e9, rel=0.015)


def test_a_curve_derived_by_hand() -> None:
    model = ModelShape("a model", "a test", 10**9, layers=10, kv_heads=4, head_dim=100)
    curve = derive(model, H100_SXM)
    assert curve.weights_s == pytest.approx(2e9 / (0.85 * 3.35e12), rel=1e-3)
    assert curve.per_token_s == pytest.approx(2e9 / (0.6 * 989e12), rel=1e-3)
    assert curve.per_context_token_s == pytest.approx(16_000 / (0.85 * 3.35e12), rel=1e-3)
    assert curve.overhead_s == pytest.approx(10 * 20e-6)
    assert "a model (a test) on 1 x H100 SXM" in curve.source
    assert "85% of the bandwidth and 60% of the FLOPS" in curve.source


@given(
    st.sampled_from([config[0] for config in CONFIGS]),
    st.sampled_from([H100_SXM, L40S]),
    st.integers(2, 8),
)
def test_devices_share_work_but_not_what_each_layer_costs(
    model: ModelShape, device: Any, count: int
) -> None:
    one, several = derive(model, device), derive(model, device, count)
    for name in ("weights_s", "per_token_s", "per_context_token_s"):
        assert getattr(several, name) * count == pytest.approx(getattr(one, name), rel=2e-3)
    assert several.overhead_s > one.overhead_s


@pytest.mark.parametrize(
    ("model", "published_s"), [(QWEN3_32B, 1 / 88.8), (LLAMA_3_3_70B, 1 / 54.7)]
)
def test_steps_of_one_request_last_about_as_long_as_published(
    model: ModelShape, published_s: float
) -> None:
    """Speculative Speculative Decoding, arXiv 2603.03251: plain decoding on four H100."""
    step = derive(model, H100_SXM, 4).seconds(tokens=1, requests=1, context=500)
    assert step == pytest.approx(published_s, rel=0.1)


def test_pairs_of_the_benchmarks_are_what_the_data_sheets_give() -> None:
    made = {pair.name: pair for pair in runpy.run_path(str(BENCHMARKS / "make_pairs.py"))["PAIRS"]}
    files = {path.stem: CostModel.load(path) for path in (BENCHMARKS / "pairs").glob("*.json")}
    assert files == made, "run python benchmarks/make_pairs.py"
