"""What the documentation takes from the code: tables, where a page has ``<!-- options -->``."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from minedraft.config import MineDraftConfig
from minedraft.verifier.metrics import COUNTERS, DECISION, GAUGES
from minedraft.verifier.options import PREFIX, RequestOptions


def _described(options: Any, prefix: str = "") -> Iterator[str]:
    """A row for each option of a struct: name, values, default, what it does."""
    yield "| option | values | default | |"
    yield "|---|---|---|---|"
    hints, defaults = get_type_hints(options, include_extras=True), options()
    for name, hint in hints.items():
        default = getattr(defaults, name)
        shown = "" if default is None else f"`{str(default).lower()}`"
        kind, meta = hint.__origin__, hint.__metadata__[0]
        yield f"| `{prefix}{name}` | {_values(kind, meta)} | {shown} | {meta.description} |"


def _values(kind: Any, meta: Any) -> str:
    """What the option may be."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if kind is bool or bool in get_args(kind):
        return "`true`, `false`"
    return f"above {meta.gt} to {meta.le}" if meta.ge is None else f"{meta.ge} to {meta.le}"


def _metrics() -> Iterator[str]:
    yield "| metric | kind | |"
    yield "|---|---|---|"
    for kind, families in (("counter", COUNTERS), ("gauge", GAUGES)):
        for family in families:
            name = f"{family.name}_total" if kind == "counter" else family.name
            label = f" Label: `{family.label}`." if family.label else ""
            yield f"| `{name}` | {kind} | {family.text}{label} |"
    yield f"| `{DECISION}` | gauge | 1 for the mode that is in force now. Label: `mode`. |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "options": lambda: _described(MineDraftConfig),
    "request options": lambda: _described(RequestOptions, PREFIX),
    "metrics": _metrics,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    for name, rows in TABLES.items():
        markdown = markdown.replace(f"<!-- {name} -->", "\n".join(rows()))
    return markdown
