"""The checks of ``minedraft doctor`` that need vLLM: do these two models work together here?"""

import os
from collections.abc import Iterator
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs

from minedraft import beside, devices, vocabulary, weights
from minedraft.config import ConfigError, MineDraftConfig
from minedraft.doctor import Check, Finding, Subject
from minedraft.drafter import engine
from minedraft.drafter.child import NoDrafterError, greet
from minedraft.engine_options import CPU_KV_CACHE_BYTES, one_line, with_cpu_defaults
from minedraft.verifier import refusals, runner_choice
from minedraft.verifier.plugin import class_options

GREETING_S = 5.0
GIB = 1 << 30


def target(subject: Subject) -> Iterator[Finding]:
    """Is it a model that can be served with drafts?"""
    options = with_cpu_defaults({}) | class_options(MineDraftConfig(), 1)
    try:
        config = beside.vllm_config(str(subject.target), options)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{subject.target}: {one_line(error)}") from error
    refusals.check_target(config)
    subject.target_config = config
    found = f"{subject.target} can be served, {config.model_config.max_model_len} tokens of context"
    yield Finding("target", "ok", found)


def draft_model(subject: Subject) -> Iterator[Finding]:
    """Is it a model that can draft?"""
    if subject.draft is None:
        return
    try:
        config = engine.configure(EngineArgs(subject.draft))
    except (engine.DraftEngineError, ValueError, OSError) as error:
        raise ConfigError(
            f"{subject.draft}: {one_line(error)}; take another drafter, a small decoder-only "
            "model of the target's family"
        ) from error
    subject.draft_config = config
    yield Finding("draft_model", "ok", f"{subject.draft} can draft")


def runner(subject: Subject) -> Iterator[Finding]:
    """Which model runner does vLLM take for each, and how does it schedule?"""
    if subject.target_config is not None:
        found = f"target: {runner_choice.describe(subject.target_config)}"
        yield Finding("runner", "ok", found)
    if subject.draft_config is not None:
        found = f"drafter: {runner_choice.runner(subject.draft_config)}, synchronous always"
        yield Finding("runner", "ok", found)


def tokens(subject: Subject) -> Iterator[Finding]:
    """Do both models mean the same by a token's number?"""
    if subject.target_config is None or subject.draft_config is None:
        return
    one = beside.hello(subject.target_config.model_config)
    other = beside.hello(subject.draft_config.model_config)
    reason = vocabulary.disagreement(
        one.vocabulary, one.vocab_size, other.vocabulary, other.vocab_size
    )
    if reason is not None:
        raise ConfigError(reason)
    yield Finding("tokens", "ok", "both models have the same vocabulary")


def memory(subject: Subject) -> Iterator[Finding]:
    """Do the models, and on a CPU their KV caches, fit?"""
    models = [model for model in (subject.target, subject.draft) if model is not None]
    sizes = {model: weights.num_bytes(model) for model in models}
    for model, size in sizes.items():
        if size is None:
            advice = "it is downloaded when it is first used; run this again then"
            yield Finding("memory", "warning", f"no weights of {model} on this machine", advice)
    known = {model: size for model, size in sizes.items() if size is not None}
    if gpus := devices.visible_gpus():
        for number, (model, size) in enumerate(known.items()):
            free = weights.free_on_gpu(min(number, len(gpus) - 1))
            yield _fits(f"{model} on a GPU", size, free)
    elif known:
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        cache = int(space) * GIB if space else CPU_KV_CACHE_BYTES
        needed = sum(known.values()) + len(known) * cache
        what = f"{' and '.join(known)} with {cache / GIB:.1f} GiB of KV cache each"
        yield _fits(what, needed, weights.available())


def _fits(what: str, needed: int, available: int) -> Finding:
    found = f"{what}: {needed / GIB:.1f} GiB of {available / GIB:.1f} GiB available"
    if needed <= available:
        return Finding("memory", "ok", found)
    advice = (
        "free memory, take smaller or quantized models, give --kv-cache-memory-bytes (and the same "
        "in --drafter-args), or draft on another machine with --drafter ADDRESS"
    )
    return Finding("memory", "problem", found, advice)


def running_drafter(subject: Subject) -> Iterator[Finding]:
    """Does the one that runs elsewhere answer, and fit?"""
    if subject.drafter is None or subject.target_config is None:
        return
    hello = beside.hello(subject.target_config.model_config)
    try:
        welcome = greet(subject.drafter, hello, GREETING_S)
    except NoDrafterError:
        advice = (
            "nobody is there, or the key file is another one: the two look the same from here; "
            "see that `minedraft drafter` runs there, that its port can be reached, and copy its "
            "key file anew"
        )
        found = f"no drafter answers at {subject.drafter.address} within {GREETING_S:.0f} s"
        yield Finding("running_drafter", "problem", found, advice)
        return
    found = f"{Path(welcome.model).name} at {subject.drafter.address} answers and fits"
    yield Finding("running_drafter", "ok", found)


CHECKS: list[Check] = [target, draft_model, runner, tokens, memory, running_drafter]
