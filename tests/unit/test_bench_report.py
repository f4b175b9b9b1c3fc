"""The report says what was measured, and which comparison is which."""

import re

import pytest
from results import (
    FREE,
    NATIVE,
    NATIVE_ON_TARGET,
    OVERLAP,
    PLAIN,
    PLAIN_ON_TARGET,
    benchmark,
    request,
    run,
    setting,
)
from rich.console import Console

from minedraft.bench.comparison import SAME_PROVENANCE, compare, ratio_of
from minedraft.bench.markdown import flat, grid, number
from minedraft.bench.records import Benchmark, Engine, Load, Run
from minedraft.bench.report import NOT_RUN, TITLES, markdown, table
from minedraft.bench.summary import Spread

ENGINE = Engine(
    step_s=0.020, verify_s=0.0155, draft_s=0.0065, target_idle=0.12, drafter_idle=0.34, hidden=0.56,
    verifications=100, drafted=200, accepted=130, accepted_by_position=[87, 43],
    peak_bytes={"target": 3 * 2**30, "drafter": 2**29}, choices={"overlap": 1234},
)  # fmt: skip


def repetitions(first: float) -> list[Run]:
    """In each all settings, the second repetition on a machine of half the speed."""
    return [
        made
        for repetition, speed in enumerate((first, first / 2))
        for made in (
            run(PLAIN, speed, repetition),
            run(PLAIN_ON_TARGET, speed * 0.8, repetition),
            run(NATIVE, speed * 1.25, repetition),
            run(NATIVE_ON_TARGET, speed * 0.9, repetition),
            run(OVERLAP, speed * 1.5, repetition, engine=ENGINE),
            run(setting("overlap", 1), speed * 1.1, repetition),
            run(FREE, speed * 2, repetition, engine=Engine(step_s=0.019)),
        )
    ]


def whole() -> Benchmark:
    return benchmark(*repetitions(100.0))


def section(text: str, title: str) -> str:
    """What stands below a heading, up to the next of its rank."""
    rank, _, _ = title.partition(" ")
    below = text.split(f"\n{title}\n", 1)[1]
    return re.split(rf"\n{rank} ", below)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines[2:]]


def test_both_comparisons_are_there_named_plainly_each_system_at_its_best() -> None:
    text = markdown(whole())
    same = section(text, f"## {TITLES['all']}")
    assert [row[:4] for row in rows(same)] == [
        ["4 at a time", "plain vLLM", "CPU 0-1", "75.0 (50.0..100.0)"],
        ["4 at a time", "vLLM's draft model, K = 2", "CPU 0-1", "93.8 (62.5..125.0)"],
        ["4 at a time", "MineDraft overlapped, K = 2", "CPU 0-1", "112.5 (75.0..150.0)"],
    ]
    assert "here ours uses more hardware" not in same
    more = section(text, f"## {TITLES['target']}")
    assert [row[1:3] for row in rows(more)] == [
        ["plain vLLM", "CPU 0"],
        ["vLLM's draft model, K = 2", "CPU 0"],
        ["MineDraft overlapped, K = 2", "CPU 0-1"],
    ]
    assert "here ours uses more hardware" in more


def test_ratios_are_free_of_the_machines_drift_and_of_the_comparisons_own_baseline() -> None:
    text = markdown(whole())
    ours = {devices: rows(section(text, f"## {title}"))[-1] for devices, title in TITLES.items()}
    assert ours["all"][4:7] == ["1.50 (1.50..1.50)", "56.2", "yes"]
    assert ours["target"][4:7] == ["1.88 (1.88..1.88)", "56.2", "yes"]


def test_at_equal_drafts_all_settings_are_shown() -> None:
    text = markdown(whole())
    found = rows(section(text, f"### {TITLES['all']}, at equal K"))
    names = ["plain vLLM", "MineDraft overlapped, K = 1", "vLLM's draft model, K = 2"]
    assert [row[1] for row in found] == [*names, "MineDraft overlapped, K = 2"]


def test_what_the_engine_measured_is_there_with_units() -> None:
    (ours,) = (row for row in rows(section(markdown(whole()), "## In the engine")) if row[3])
    numbers = ["2.30", "65%", "87% 43%", "20.0", "15.5", "6.50", "12%", "34%", "56%"]
    assert ours[3:] == [*numbers, "overlap 2,468"]


def test_the_bound_and_what_a_step_takes_longer() -> None:
    (row,) = rows(section(markdown(whole()), "## The free-draft bound"))
    assert row[1] == "MineDraft overlapped, K = 2"
    assert row[5:] == ["75% (75%..75%)", "1.00 (1.00..1.00)", "5% (5%..5%)"]


def test_latencies_and_memory() -> None:
    text = markdown(whole())
    waits = rows(section(text, "## Latency"))
    assert waits[0][3:6] == ["500.0", "500.0", "500.0"]
    assert waits[0][6:9] == ["100.0", "100.0", "100.0"]
    assert waits[0][9] == "1.00"
    (peak,) = rows(section(text, "## Peak memory"))
    assert peak[3:] == ["3.50", "drafter 0.50, target 3.00"]


def test_noise_and_failures_are_said_with_their_reason() -> None:
    asked = [request(4), request(4, failed="timeout")]
    calm = run(PLAIN, 10)
    text = markdown(benchmark(calm, run(OVERLAP, 10, requests=asked, others=0.7)))
    (row,) = rows(section(text, "## Noise and failures"))
    assert row[1] == "MineDraft overlapped, K = 2"
    assert "0.7 cores" in row[3]
    assert "1 of 2 requests failed" in row[3]
    assert rows(section(text, f"## {TITLES['all']}"))[1][-1] == "noisy, 1 failed"
    assert section(markdown(benchmark(calm)), "## Noise and failures").strip().endswith("None.")


def test_provenance_and_the_command_to_repeat_it() -> None:
    text = markdown(whole(), ["plot.svg"])
    said = {row[0]: row[1] for row in rows(section(text, "## What was run"))}
    assert said == {
        "command": "minedraft bench --quick", "load": "0.1, 2", "versions, vllm": "0.32.0",
    }  # fmt: skip
    assert "![](plot.svg)" in text
    assert text.endswith("## How to repeat it\n\n    minedraft bench --quick\n")


def test_what_was_not_run_is_said() -> None:
    text = markdown(benchmark(run(OVERLAP, 10)))
    assert NOT_RUN in section(text, f"## {TITLES['target']}")
    assert NOT_RUN in section(text, "## The free-draft bound")
    assert "Not measured." in section(text, "## Peak memory")
    assert len(rows(section(text, f"## {TITLES['all']}"))) == 1


def test_a_benchmark_without_runs_has_a_report_and_a_table() -> None:
    assert NOT_RUN in section(markdown(benchmark()), f"## {TITLES['all']}")
    assert table(benchmark()).row_count == 0


def test_the_table_for_the_terminal() -> None:
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table(whole()))
    (ours,) = (line.split() for line in shown.get().splitlines() if "overlapped" in line)
    assert ours[-7:] == ["112.5", "67%", "1.50", "1.88", "100.0", "75%", "noisy"]


def test_the_table_fits_into_eighty_columns() -> None:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table(whole()))
    text = shown.get()
    assert max(map(len, text.splitlines())) <= 80
    assert all(number in text for number in ("112.5", "1.50", "1.88", "noisy"))
    assert "MineDraft" in text


def test_a_title_cannot_break_the_terminal_or_a_table() -> None:
    title = "[/red] a | b\n# c"
    assert markdown(benchmark(title=title)).startswith("# [/red] a \\| b # c\n")
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table(benchmark(run(PLAIN, 1), title=title)))
    assert "[/red] a | b" in shown.get()
    assert grid(("x",), [[title]]).splitlines()[2] == "| [/red] a \\| b # c |"


# --- two files --------------------------------------------------------------------------------


def test_two_files_differ_by_the_ratio_of_their_medians() -> None:
    a, b = benchmark(*repetitions(100)), benchmark(*repetitions(120), title="newer")
    b.provenance = {**b.provenance, "versions": {"vllm": "0.33.0"}}
    text = compare(a, b)
    found = {row[1] + row[2]: row for row in rows(section(text, "## Settings in both"))}
    expected = ["75.0 (50.0..100.0)", "90.0 (60.0..120.0)", "1.20 (0.60..2.40)"]
    assert found["plain vLLMall"][3:6] == expected
    assert found["plain vLLMall"][6:] == ["1.00", "1.00", "A B"]
    assert len(found) == 7
    differs = rows(section(text, "## What differs"))
    assert ["versions, vllm", "0.32.0", "0.33.0"] in differs
    assert {row[0] for row in differs} == {"title", "versions, vllm"}


def test_settings_in_one_file_only_are_listed() -> None:
    eight = setting("overlap", 2, Load(concurrency=8))
    text = compare(benchmark(run(PLAIN, 10), run(eight, 7)), benchmark(run(PLAIN, 10)))
    (row,) = rows(section(text, "## Settings in A only"))
    assert row == ["8 at a time", "MineDraft overlapped, K = 2", "all", "7.00 (7.00..7.00)"]
    assert "## Settings in B only" not in text
    assert SAME_PROVENANCE in text


def test_a_file_beside_itself_has_the_ratio_one() -> None:
    a = benchmark(run(PLAIN, 10), run(OVERLAP, 12))
    found = rows(section(compare(a, a), "## Settings in both"))
    assert [row[5] for row in found] == ["1.00 (1.00..1.00)"] * 2


def test_there_is_no_ratio_to_nothing() -> None:
    assert ratio_of(Spread(1, 1, 1), Spread(0.5, 0, 1)) is None


# --- Markdown ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (1.234, "1.23"), (12.34, "12.3"), (-12.34, "-12.3"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits_or_more(value: float, text: str) -> None:
    assert number(value) == text


def test_nested_values_are_named_by_the_way_to_them() -> None:
    nested = {"a": {"b": {"c": 1}, "d": [1, "x"]}, "e": None}
    assert flat(nested) == {"a, b, c": "1", "a, d": "1, x", "e": "None"}


def test_the_curve_is_fitted_to_passes_on_the_targets_devices() -> None:
    """2 ms, 1 ms a token from the fourth on; passes on all devices are other ones."""
    sizes = [(t, r, c) for t in (2, 3, 4, 8, 16, 32) for r in (1, 2) for c in (100, 900)]
    passes = [(*size, 0.002 + 0.001 * max(4, size[0])) for size in sizes]
    target = run(PLAIN_ON_TARGET, 5.0, engine=Engine(passes=passes))
    everywhere = run(PLAIN, 5.0, engine=Engine(passes=[(1, 1, 1, 9.0)] * 99))
    text = markdown(benchmark(target, everywhere))
    assert "Of 24 passes on the target's devices" in text
    assert "max(4 ms, 1 ms x tokens)" in text
