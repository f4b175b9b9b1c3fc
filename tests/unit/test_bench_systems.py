"""Every system on both kinds of devices; one engine for all of ours; runs are interleaved."""

from itertools import pairwise
from typing import Any

import pytest

from minedraft.bench.offline import Plan, places
from minedraft.bench.records import OURS, Load, System
from minedraft.bench.systems import NAMES, Pair, check_names, engine_job, systems
from minedraft.config import ConfigError
from minedraft.placement import Placement

CPU = Pair("T", "D", Placement((0, 1), (2,)), {"max_num_seqs": 8})
GPU = Pair("T", "D", Placement(drafter_gpu="1"), {}, {"tensor_parallel_size": 2})


def options(system: System, pair: Pair = CPU) -> dict[str, Any]:
    return engine_job(system, pair, 4).options


def test_all_systems_on_both_kinds_of_devices() -> None:
    found = systems(NAMES, [2, 4])
    assert len(found) == len(set(found)) == 2 + 4 + 4 + 4 + 4 + 1
    assert {s.devices for s in found if s.name in OURS} == {"all"}
    assert sum(s.free for s in found) == 4
    assert System("auto", "all", 4) in found
    target_only = systems(NAMES, [2], all_devices=False, free=False)
    assert {s.devices for s in target_only if s.name not in OURS} == {"target"}
    assert not any(s.free for s in target_only)


def test_vllms_own_have_the_devices_that_are_said() -> None:
    assert options(System("plain", "all"))["target_cores"] == "0-2"
    assert options(System("plain", "target"))["target_cores"] == "0-1"
    assert options(System("plain", "all"), GPU)["tensor_parallel_size"] == 2
    assert "tensor_parallel_size" not in options(System("plain", "target"), GPU)
    native = options(System("draft_model", "target", 2))["speculative_config"]
    assert native == {"method": "draft_model", "model": "D", "num_speculative_tokens": 2}
    assert options(System("ngram", "target", 3))["speculative_config"]["method"] == "ngram"


def test_ours_share_an_engine() -> None:
    ours = {
        engine_job(System(name, "all", k, free=free), CPU, 4).key
        for name in OURS
        for k in (2, 4)
        for free in (False, True)
    }
    assert len(ours) == 1
    ours_on_cpu = options(System("overlap", "all", 2))
    assert (ours_on_cpu["target_cores"], ours_on_cpu["drafter_cores"]) == ("0-1", "2")
    assert ours_on_cpu["num_speculative_tokens"] == 4
    assert options(System("overlap", "all", 2), GPU)["drafter_gpu"] == "1"
    assert all(options(System(name, "all", 2))["max_num_seqs"] == 8 for name in NAMES)


def test_a_bound_comes_after_what_it_replays_and_engines_are_not_changed_in_between() -> None:
    loads = [Load(concurrency=n) for n in (1, 4)]
    plan = Plan(CPU, systems(NAMES, [2, 4]), loads, [], 1, 0, 0.0, 0.0, 9)
    found = places(plan)
    assert len(found) == 2 * len(plan.systems)
    jobs = [place.job.key for place in found]
    changes = sum(a != b for a, b in pairwise(jobs))
    assert changes == len(set(jobs)) - 1
    settings = [place.setting for place in found]
    for setting in settings:
        if setting.system.free:
            system = System(setting.system.name, "all", setting.system.num_drafts)
            replayed = next(s for s in settings if s.system == system and s.load == setting.load)
            assert settings.index(replayed) < settings.index(setting)


def test_names() -> None:
    assert check_names(["auto", "plain"]) == ["plain", "auto"]
    with pytest.raises(ConfigError, match="--systems fast: the systems are plain, ngram"):
        check_names(["plain", "fast"])


def test_devices_are_named() -> None:
    assert CPU.devices() == {"all": "CPU 0-2", "target": "CPU 0-1"}
    assert "GPU" in GPU.devices()["all"]


def test_the_demo_flags_are_vllms() -> None:
    import shlex

    from minedraft.commands.bench import DEMO_FLAGS
    from minedraft.engine_options import parse_flags

    assert parse_flags(shlex.split(DEMO_FLAGS), program="x")["kv_cache_memory_bytes"] == 256 << 20
