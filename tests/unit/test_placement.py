"""Cores and GPUs: what was asked for is kept to the letter, and nothing is given out twice."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minedraft import devices
from minedraft.config import ConfigError
from minedraft.placement import (
    DRAFTER_CORES_SHARE,
    Placement,
    divide_cores,
    format_cores,
    parse_cores,
    place_on_cpu,
    place_on_gpu,
)

cores = st.sets(st.integers(0, 300), min_size=1, max_size=40)


def one_line(raised: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


# --- lists of cores -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("0", (0,)),
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("8,0-3", (0, 1, 2, 3, 8)),
        ("5-5", (5,)),
        ("1,1,0-2", (0, 1, 2)),
        (" 0-1 , 4 ", (0, 1, 4)),
        ("007", (7,)),
    ],
)
def test_lists_that_are_read(text: str, parsed: tuple[int, ...]) -> None:
    assert parse_cores(text) == parsed


NO_LISTS = ["", " ", ",", "0,", "a", "-1", "0-", "-", "0--1", "1.5", "0x1", "0;1", "0-1-2", "1 - 2"]
TOO_LARGE = ["0-999999999", "99999999", "0-" + "9" * 5000, "9" * 5000]


@pytest.mark.parametrize("text", [*NO_LISTS, "3-0", "0,5-3", *TOO_LARGE], ids=lambda text: text[:9])
def test_what_is_no_list_of_cores_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="^cores '") as raised:
        parse_cores(text)
    one_line(raised)


@given(cores)
def test_what_is_written_is_read_as_it_was(numbers: set[int]) -> None:
    assert parse_cores(format_cores(sorted(numbers))) == tuple(sorted(numbers))


@given(cores)
def test_a_list_is_as_short_as_can_be(numbers: set[int]) -> None:
    runs = sum(1 for number in numbers if number - 1 not in numbers)
    assert len(format_cores(sorted(numbers)).split(",")) == runs


@given(st.text(alphabet="0123456789-, \n\u0663", max_size=12))
@example("\u0663")
@example("0-0\n")
def test_any_text_is_a_list_of_cores_or_refused(text: str) -> None:
    try:
        parsed = parse_cores(text)
    except ConfigError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert list(parsed) == sorted(set(parsed))
        assert parsed
        assert {int(number) for number in text.replace("-", ",").split(",")} <= set(parsed)


@given(cores, st.integers(1, 12))
def test_workers_share_the_cores_evenly(numbers: set[int], parts: int) -> None:
    shares = divide_cores(sorted(numbers), parts)
    assert len(shares) == parts
    if len(numbers) < parts:
        assert set(shares) == {tuple(sorted(numbers))}
    else:
        assert [core for share in shares for core in share] == sorted(numbers)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


# --- placing on cores -----------------------------------------------------------------------------


@given(st.sets(st.integers(0, 300), min_size=2, max_size=64))
def test_by_default_the_drafter_gets_its_share_and_shares_nothing(available: set[int]) -> None:
    placed = place_on_cpu(available)
    assert len(placed.drafter_cores) == max(1, len(available) // DRAFTER_CORES_SHARE)
    assert not set(placed.drafter_cores) & set(placed.target_cores)
    assert set(placed.drafter_cores) | set(placed.target_cores) == available


@given(cores, st.data())
def test_what_was_asked_for_is_kept_and_the_rest_shares_nothing(
    available: set[int], data: st.DataObject
) -> None:
    some = st.none() | st.sets(st.sampled_from(sorted(available)), min_size=1)
    target, drafter = data.draw(some), data.draw(some)
    flags = [format_cores(sorted(wish)) if wish else None for wish in (target, drafter)]
    try:
        placed = place_on_cpu(available, target_cores=flags[0], drafter_cores=flags[1])
    except ConfigError:
        assert drafter is None
        assert target == available or (target is None and len(available) == 1)
        return
    if target is not None:
        assert set(placed.target_cores) == target
    if drafter is not None:
        assert set(placed.drafter_cores) == drafter
    assert placed.target_cores
    assert placed.drafter_cores
    assert set(placed.target_cores) | set(placed.drafter_cores) <= available
    shared = set(placed.target_cores) & set(placed.drafter_cores)
    assert not shared or drafter == available or (target is not None and drafter is not None)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"target_cores": "0-9"}, "--target-cores: CPU 4-9 is not available, only 0-3"),
        ({"drafter_cores": "7,9"}, "--drafter-cores: CPU 7,9 is not available, only 0-3"),
        ({"target_cores": "0-3"}, "no core is left for the drafter; give --drafter-cores"),
        ({"drafter_cores": "x"}, "cores 'x': write numbers and ranges"),
    ],
)
def test_cores_that_cannot_be_given_are_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        place_on_cpu({0, 1, 2, 3}, **flags)
    assert one_line(raised).startswith(says)


def test_one_core_is_shared_only_when_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"give --drafter-cores to share .* or --drafter ADDRESS"):
        place_on_cpu({3})
    assert place_on_cpu({3}, drafter_cores="3") == Placement((3,), (3,))


# --- placing on GPUs ------------------------------------------------------------------------------


@given(st.lists(st.text("0123456789abGPU-", min_size=1), min_size=1, unique=True), st.data())
def test_the_drafter_gets_the_first_gpu_that_the_target_leaves(
    visible: list[str], data: st.DataObject
) -> None:
    target_gpus = data.draw(st.integers(1, len(visible) + 1))
    if target_gpus < len(visible):
        assert place_on_gpu(visible, target_gpus=target_gpus).drafter_gpu == visible[target_gpus]
    else:
        with pytest.raises(ConfigError, match="--drafter-gpu to share one") as raised:
            place_on_gpu(visible, target_gpus=target_gpus)
        assert "--drafter-cores" not in one_line(raised), "which are for vLLM on CPU"


def test_a_gpu_that_was_asked_for_is_given_even_if_shared() -> None:
    assert place_on_gpu(["2", "5"], target_gpus=2, drafter_gpu="5").drafter_gpu == "5"
    with pytest.raises(ConfigError, match="--drafter-gpu 1: not one of the visible GPUs 2,5"):
        place_on_gpu(["2", "5"], target_gpus=1, drafter_gpu="1")


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Placement((0, 1), (2,)), "target on CPU 0-1, drafter on CPU 2"),
        (Placement(), "target on any CPU, drafter elsewhere"),
        (Placement(drafter_gpu="1"), "drafter on GPU 1"),
    ],
)
def test_a_placement_says_what_runs_where(placement: Placement, text: str) -> None:
    assert str(placement) == text


# --- this process ---------------------------------------------------------------------------------


@pytest.fixture
def affinity() -> Iterator[set[int]]:
    """The cores of this process, which get back what they were."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("own_process", [False, True])
def test_the_target_is_put_on_its_cores(affinity: set[int], own_process: bool) -> None:
    core = max(affinity)
    with devices.target_on_cpu(Placement((core,)), own_process=own_process):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == (affinity if own_process else {core})


@pytest.mark.parametrize(("ranks", "bound"), [(1, "{0}"), (2, "{0}|{0}")])
def test_each_worker_of_a_child_is_bound_to_its_share(
    affinity: set[int], monkeypatch: pytest.MonkeyPatch, ranks: int, bound: str
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    core = max(affinity)
    with devices.target_on_cpu(Placement((core,)), own_process=True, ranks=ranks):
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == bound.format(core)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "auto"


def test_cores_that_are_not_there_are_refused_and_nothing_is_changed(affinity: set[int]) -> None:
    for missing in (max(affinity) + 1, 5000, 1 << 70):
        with (
            pytest.raises(ConfigError, match=f"CPU {missing} is not available") as raised,
            devices.target_on_cpu(Placement((min(affinity), missing)), own_process=True),
        ):
            pass
        one_line(raised)
        assert os.sched_getaffinity(0) == affinity


def test_variables_are_set_meanwhile_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MD_OLD", "old")
    monkeypatch.delenv("MD_NEW", raising=False)

    def fail() -> None:
        with devices.environment({"MD_OLD": "new", "MD_NEW": "1"}):
            assert (os.environ["MD_OLD"], os.environ["MD_NEW"]) == ("new", "1")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.environ["MD_OLD"] == "old"
    assert "MD_NEW" not in os.environ


# --- what is there --------------------------------------------------------------------------------


def test_visible_gpus_are_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert devices.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert devices.visible_gpus() == ["5", "7"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert devices.visible_gpus() == []
