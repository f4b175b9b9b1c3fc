"""The Grafana dashboard asks only for metrics that exist, and shows all of ours."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm_sources import sources

from minedraft.verifier.metrics import COUNTERS, DECISION, GAUGES, LABELS

DASHBOARD = json.loads((Path(__file__).parents[2] / "dashboards/minedraft.json").read_text())
OURS = {f"{family.name}_total" for family in COUNTERS} | {f.name for f in GAUGES} | {DECISION}
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES += [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
ASKED = {name for query in QUERIES for name in re.findall(r"\b(?:minedraft|vllm):\w+", query)}


def test_what_it_asks_of_us_is_published_and_the_other_way_round() -> None:
    assert {name for name in ASKED if name.startswith("minedraft:")} == OURS


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
def test_what_it_asks_of_vllm_is_there_with_our_labels(release: str) -> None:
    files = ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py")
    text = "".join((sources(release) / file).read_text() for file in files)
    asked = {name for name in ASKED if name.startswith("vllm:")}
    assert "vllm:spec_decode_num_accepted_tokens_total" in asked
    # prometheus_client adds _total to the names of counters.
    assert {n for n in asked if f'"{n.removesuffix("_total")}"' not in text} == set()
    assert f"labelnames = {json.dumps(list(LABELS))}" in text


def test_every_query_is_of_the_chosen_models_and_engines() -> None:
    for query in (target["expr"] for panel in PANELS for target in panel["targets"]):
        chosen = re.findall(r':\w+\{model_name=~"\$model", engine=~"\$engine"', query)
        assert len(chosen) == len(re.findall(r"\b(?:minedraft|vllm):\w+", query)), query
        assert Counter(query)["("] == Counter(query)[")"]


def test_labels_in_legends_and_sums_are_those_of_the_metrics() -> None:
    known = {f"{f.name}_total": {*LABELS, f.label} for f in COUNTERS} | {
        DECISION: {*LABELS, "mode"}
    }
    known["vllm:spec_decode_num_accepted_tokens_per_pos_total"] = {*LABELS, "position"}
    for panel in PANELS:
        for target in panel["targets"]:
            names = re.findall(r"\b(?:minedraft|vllm):\w+", target["expr"])
            there = set.union(*(known.get(name, set(LABELS)) for name in names))
            asked = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            asked |= {
                w for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for w in by.split(", ")
            }
            assert asked <= there, panel["title"]


def test_panels_do_not_lie_on_each_other() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    cells = Counter(
        (x, y)
        for p in places
        for x in range(p["x"], p["x"] + p["w"])
        for y in range(p["y"], p["y"] + p["h"])
    )
    assert set(cells.values()) == {1}
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
