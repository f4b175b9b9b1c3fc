"""Options: what is read is what was written, and what cannot be is refused in one line."""

import subprocess
import sys
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minedraft.config import (
    ADDITIONAL_CONFIG_KEY,
    ENV_DRAFTER,
    ENV_KEY_FILE,
    ConfigError,
    Endpoint,
    MineDraftConfig,
    Mode,
    check_num_speculative_tokens,
    path_of_engine,
)
from minedraft.devices import environment
from minedraft.protocol import MAX_DRAFT_TOKENS

MODES = ["auto", "overlap", "sequential"]
OPTIONS = MineDraftConfig.__struct_fields__


@st.composite
def configs(draw: st.DrawFn) -> MineDraftConfig:
    waits = sorted([draw(st.floats(0, 3600)), draw(st.floats(1e-6, 3600))])
    return MineDraftConfig(
        mode=draw(st.sampled_from(MODES)),
        draft_seeded=draw(st.booleans()),
        max_wait_s=max(waits[1], 1e-6),
        min_wait_s=waits[0],
        wait_for_first_drafts=draw(st.booleans()),
    )


def refusal(options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        MineDraftConfig.parse(options)
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith("minedraft options: ")
    return text


@given(configs())
def test_additional_config_is_read_as_it_was_written(config: MineDraftConfig) -> None:
    written = config.additional_config()
    assert MineDraftConfig.parse(written[ADDITIONAL_CONFIG_KEY]) == config
    as_json = msgspec.json.decode(msgspec.json.encode(written))
    assert MineDraftConfig.parse(as_json[ADDITIONAL_CONFIG_KEY]) == config, "as --additional-config"


def test_without_options_the_defaults_hold() -> None:
    assert MineDraftConfig.parse(None) == MineDraftConfig.parse({}) == MineDraftConfig()
    assert MineDraftConfig.parse({"mode": "sequential"}) == MineDraftConfig(mode="sequential")
    assert MineDraftConfig.parse({"max_wait_s": 3}).max_wait_s == 3.0, "a whole number of seconds"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mod": "overlap"}, "unknown field `mod`; the options are mode, draft_seeded"),
        ({"mode": "off"}, "Invalid enum value 'off' - at `$.mode`"),
        ({"mode": None}, "at `$.mode`"),
        ({"draft_seeded": 1}, "Expected `bool`, got `int` - at `$.draft_seeded`"),
        ({"draft_seeded": "false"}, "Expected `bool`, got `str`"),
        ({"max_wait_s": "2"}, "Expected `float`, got `str` - at `$.max_wait_s`"),
        ({"max_wait_s": True}, "Expected `float`, got `bool`"),
        ({"max_wait_s": 0}, "Expected `float` > 0.0 - at `$.max_wait_s`"),
        ({"max_wait_s": 3601}, "Expected `float` <= 3600.0"),
        ({"max_wait_s": float("nan")}, "at `$.max_wait_s`"),
        ({"max_wait_s": float("inf")}, "at `$.max_wait_s`"),
        ({"min_wait_s": -0.1}, "Expected `float` >= 0.0 - at `$.min_wait_s`"),
        ({"min_wait_s": float("nan")}, "at `$.min_wait_s`"),
        ({"min_wait_s": 3}, "min_wait_s=3.0 is above max_wait_s=2.0; lower the first or raise"),
        ({"max_wait_s": 0.01}, "min_wait_s=0.02 is above max_wait_s=0.01"),
        ({1: 2}, "Expected `str`"),
        ([], "Expected `object`, got `array`"),
        ([["mode", "overlap"]], "Expected `object`, got `array`"),
        ("", "Expected `object`, got `str`"),
        ("mode=overlap", "Expected `object`, got `str`"),
        (0, "Expected `object`, got `int`"),
        (False, "Expected `object`, got `bool`"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: Any, says: str) -> None:
    assert says in refusal(options)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=3,
)


@given(st.dictionaries(st.sampled_from(OPTIONS) | st.text(max_size=5), values, max_size=3))
@example({"a\nb": 1})
def test_anything_is_read_within_bounds_or_refused(options: dict[str, Any]) -> None:
    try:
        config = MineDraftConfig.parse(options)
    except ConfigError:
        refusal(options)
        return
    assert set(options) <= set(OPTIONS)
    assert all(getattr(config, name) == value for name, value in options.items())
    assert config.mode in MODES
    assert 0 <= config.min_wait_s <= config.max_wait_s <= 3600
    assert config.max_wait_s > 0
    assert type(config.draft_seeded) is type(config.wait_for_first_drafts) is bool


def test_every_option_says_what_it_does() -> None:
    hints = get_type_hints(MineDraftConfig, include_extras=True)
    for name in OPTIONS:
        meta = get_args(hints[name])[1]
        assert isinstance(meta, msgspec.Meta)
        assert MineDraftConfig.descriptions()[name] == meta.description
        assert len(str(meta.description)) > 20
    assert list(MineDraftConfig.descriptions()) == list(OPTIONS)


printable = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)


@given(printable, st.none() | printable)
def test_an_endpoint_travels_through_the_environment(address: str, key_file: str | None) -> None:
    endpoint = Endpoint(address, key_file)
    with environment(endpoint.environment()):
        assert Endpoint.from_environment() == endpoint


def test_an_endpoint_replaces_the_key_file_of_the_one_before() -> None:
    with (
        environment(Endpoint("tcp://a:1", "key").environment()),
        environment(Endpoint("ipc:///a").environment()),
    ):
        assert Endpoint.from_environment() == Endpoint("ipc:///a", None)


def test_an_endpoint_reaches_child_processes() -> None:
    code = "from minedraft.config import Endpoint; print(Endpoint.from_environment())"
    endpoint = Endpoint("tcp://a:1", "/k e/y")
    with environment(endpoint.environment() | {"PYTHONPATH": ":".join(sys.path)}):
        told = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert told.strip() == str(endpoint)


@pytest.mark.parametrize("address", [None, ""])
def test_without_an_address_it_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.setenv(ENV_KEY_FILE, "key")
    if address is None:
        monkeypatch.delenv(ENV_DRAFTER, raising=False)
    else:
        monkeypatch.setenv(ENV_DRAFTER, address)
    with pytest.raises(ConfigError, match=f"^no drafter: set {ENV_DRAFTER} to the address"):
        Endpoint.from_environment()


@given(st.integers(-5, 2 * MAX_DRAFT_TOKENS))
def test_numbers_of_speculative_tokens(num: int) -> None:
    if 1 <= num <= MAX_DRAFT_TOKENS:
        assert check_num_speculative_tokens(num) == num
    else:
        with pytest.raises(ConfigError, match=rf"^--num-speculative-tokens {num}: give .* 1 to 32"):
            check_num_speculative_tokens(num)


@pytest.mark.parametrize("engine", [1, 12])
def test_engines_write_beside_the_first(engine: int) -> None:
    assert path_of_engine("/a/b.c/trace.json", 0) == "/a/b.c/trace.json"
    assert path_of_engine("/a/b.c/trace.json", engine) == f"/a/b.c/trace-{engine}.json"
    assert path_of_engine("/a/b.c/trace", engine) == f"/a/b.c/trace-{engine}"
    assert path_of_engine("", engine) == ""


def test_an_engine_can_be_told_every_mode_and_off() -> None:
    modes = get_type_hints(MineDraftConfig)["mode"]
    assert {*get_args(modes), "off"} == set(get_args(Mode))
