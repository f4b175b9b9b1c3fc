"""The documentation names all that there is, and nothing that is not."""

import argparse
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from minedraft import cli, config
from minedraft.config import MineDraftConfig
from minedraft.verifier.metrics import COUNTERS, DECISION, GAUGES
from minedraft.verifier.options import RequestOptions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BUILD = runpy.run_path(str(DOCS / "generated.py"))["on_page_markdown"]
PAGES = {page.name: str(BUILD(page.read_text())) for page in DOCS.glob("*.md")}
TEXT = "\n".join(PAGES.values())


def parsers() -> dict[str, argparse.ArgumentParser]:
    commands = argparse.ArgumentParser(prog=cli.PROGRAM).add_subparsers()
    for command in cli.COMMANDS:
        command.add(commands)
    return dict(commands.choices)


PARSERS = parsers()


def rows(page: str) -> set[str]:
    """What stands in the first column of a page's tables, as code."""
    return set(re.findall(r"^\| `([^`]+)`", PAGES[page], re.MULTILINE))


def says(word: str) -> bool:
    """Whether a page has the word, not as a part of another one."""
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", TEXT) is not None


def test_every_option_has_a_row() -> None:
    assert set(MineDraftConfig.__struct_fields__) <= rows("configuration.md")
    assert set(RequestOptions.__struct_encode_fields__) <= rows("configuration.md")


def test_every_variable_has_a_row() -> None:
    variables = {value for name, value in vars(config).items() if name.startswith("ENV_")}
    assert variables
    assert variables <= rows("configuration.md")


def test_every_metric_has_a_row() -> None:
    counters = {f"{family.name}_total" for family in COUNTERS}
    assert counters | {family.name for family in GAUGES} | {DECISION} <= rows("operations.md")


def test_every_command_is_named() -> None:
    assert len(PARSERS) == len(cli.COMMANDS)
    assert [name for name in PARSERS if not says(f"{cli.PROGRAM} {name}")] == []


def test_every_flag_is_named() -> None:
    flags = {flag for parser in PARSERS.values() for flag in parser._option_string_actions}
    options = rows("configuration.md")
    missing = {flag for flag in flags if not says(flag)} - {"-h", "--help"}
    assert {flag for flag in missing if flag[2:].replace("-", "_") not in options} == set()


@pytest.mark.parametrize("page", [*DOCS.glob("*.md"), ROOT / "README.md"], ids=lambda p: p.name)
def test_every_command_line_is_one_that_is_parsed(page: Path) -> None:
    """Flags that the command does not know would be vLLM's: there is none of these in the pages."""
    for line in re.findall(rf"^ *{cli.PROGRAM} (.+)$", page.read_text(), re.MULTILINE):
        name, *words = re.sub(r"\[[^]]*\]|#.*|&$", "", line).split()
        try:
            _, unknown = PARSERS[name].parse_known_args(words)
        except SystemExit:
            pytest.fail(f"{cli.PROGRAM} {line}")
        assert unknown == [], line


def test_every_table_is_filled_in() -> None:
    assert "<!--" not in TEXT


def named_tests() -> Iterator[tuple[str, str]]:
    """File and function of each test that the page of features names; a file alone with ""."""
    file = ""
    for word in re.findall(r"`([^`\n]+)`", PAGES["features.md"]):
        if re.fullmatch(r"(\w+/)?test_\w+\.py", word):
            file = word
            yield file, ""
        elif re.fullmatch(r"test_\w+", word):
            yield file, word


def test_the_tests_that_features_name_are_there() -> None:
    named = set(named_tests())
    assert len(named) > 20
    for file, function in named:
        found = [
            path for path in (ROOT / "tests").rglob("test_*.py") if f"/{path}".endswith(f"/{file}")
        ]
        assert len(found) == 1, file
        if function:
            assert re.search(rf"^def {function}\(", found[0].read_text(), re.MULTILINE), function
