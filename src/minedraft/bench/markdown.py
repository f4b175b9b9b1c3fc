"""Numbers and tables in Markdown."""

from collections.abc import Sequence
from typing import Any

from minedraft.bench.latency import Percentiles
from minedraft.bench.summary import Spread

Row = Sequence[str]


def grid(columns: Sequence[str], rows: Sequence[Row], text_columns: int = 3) -> str:
    """A table whose first columns are text and whose others are numbers."""
    lines = [":--" if index < text_columns else "--:" for index in range(len(columns))]
    cells = [columns, lines, *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def cell(text: str) -> str:
    """Text that ends neither its cell nor its row."""
    return " ".join(text.split()).replace("|", "\\|")


def number(value: float) -> str:
    """With three digits or more."""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def spread(value: Spread | None, scale: float = 1) -> str:
    """Median (min..max); empty without a value."""
    if value is None:
        return ""
    low, high = number(scale * value.low), number(scale * value.high)
    return f"{number(scale * value.median)} ({low}..{high})"


def median(value: Spread | None, scale: float = 1) -> str:
    """Empty without a value."""
    return "" if value is None else number(scale * value.median)


def share(value: float | None) -> str:
    """In percent; empty without a value."""
    return "" if value is None else f"{value:.0%}"


def three(value: Percentiles | None, scale: float = 1) -> list[str]:
    """The three percentiles as cells."""
    if value is None:
        return ["", "", ""]
    return [number(scale * seconds) for seconds in (value.p50, value.p90, value.p99)]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as one text for each leaf; its name says the way to it."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}, ")
        elif isinstance(value, list):
            found[prefix + name] = ", ".join(map(str, value))
        else:
            found[prefix + name] = str(value)
    return found
