"""What a request may ask, as Python and as HTTP write it."""

from typing import Any

import pytest

from minedraft.config import ConfigError
from minedraft.protocol import MAX_DRAFT_TOKENS
from minedraft.verifier.options import DEFAULT, RequestOptions


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}])
def test_by_default_all_is_drafted(extra: dict[str, Any] | None) -> None:
    options = RequestOptions.of(extra)
    assert options is DEFAULT
    assert options.draft
    assert options.max_draft_tokens == MAX_DRAFT_TOKENS
    assert options.draft_seeded is None


@pytest.mark.parametrize("value", [False, 0, "0", "false"])
def test_a_switch_may_be_written_in_many_ways(value: Any) -> None:
    assert RequestOptions.of({"minedraft_draft": value, "other": 1}).draft is False
    assert RequestOptions.of({"minedraft_draft_seeded": value}).draft_seeded is False


@pytest.mark.parametrize("value", [2, "2"])
def test_a_number_may_be_text(value: Any) -> None:
    assert RequestOptions.of({"minedraft_max_draft_tokens": value}).max_draft_tokens == 2


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"minedraft_drafts": 1}, "minedraft_drafts"),
        ({"minedraft_max_draft_tokens": -1}, ">= 0"),
        ({"minedraft_max_draft_tokens": 33}, "<= 32"),
        ({"minedraft_max_draft_tokens": [2]}, "minedraft_max_draft_tokens"),
        ({"minedraft_draft": "perhaps"}, "minedraft_draft"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RequestOptions.of(extra)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "minedraft_draft_seeded" in str(raised.value), "it names what there is"
