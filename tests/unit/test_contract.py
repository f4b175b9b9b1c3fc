"""The contract: what it finds in the sources of vLLM releases, whole and mutated."""

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NamedTuple

import pytest
from vllm_sources import sources

from minedraft.config import ConfigError
from minedraft.verifier import contract
from minedraft.verifier.contract import ContractError
from minedraft.verifier.contract_check import Class, Function, Hook, Name, Texts, violations

RELEASES = ("0.32.0", "0.33.0")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("release", RELEASES)
def test_the_releases_we_support_have_every_hook(release: str) -> None:
    assert contract.check(sources(release)) == []


# --- mutations of the real sources -----------------------------------------------------------


class Mutation(NamedTuple):
    """A change in a vLLM, and the line that names it."""

    file: str
    old: str
    new: str
    line: str


SCHEDULER = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
MUTATIONS = [
    Mutation(
        "v1/core/sched/scheduler.py",
        "def update_draft_token_ids(",
        "def take_draft_token_ids(",
        f"{SCHEDULER}.update_draft_token_ids: there is no such method",
    ),
    Mutation(
        "v1/core/sched/scheduler.py",
        "def schedule(self, throttle_prefills: bool = False)",
        "def schedule(self, throttle_prefills: bool = False, budget: int = 0)",
        f"{SCHEDULER}.schedule: takes budget now, which ours does not",
    ),
    Mutation(
        "v1/core/sched/scheduler.py",
        "        self.current_step = 0\n",
        "        self.current_step = 0\n        self._stats = None\n",
        f"{SCHEDULER}._stats: exists, and our subclass uses the name for something else",
    ),
    Mutation(
        "v1/core/sched/scheduler.py",
        "request.next_decode_eligible_step",
        "request.eligible_step",
        "vllm.v1.core.sched.scheduler.Scheduler: does not look at .next_decode_eligible_step any "
        "more, which we set",
    ),
    Mutation(
        "v1/core/sched/scheduler.py",
        "self.prev_step_scheduled_req_ids.update(",
        "self.prev_step_scheduled_req_ids.symmetric_difference_update(",
        "vllm.v1.core.sched.scheduler.Scheduler.prev_step_scheduled_req_ids: is used by "
        "symmetric_difference_update, which our stand-in has not",
    ),
    Mutation(
        "v1/request.py",
        "        self.next_decode_eligible_step = 0\n",
        "",
        "vllm.v1.request.Request.next_decode_eligible_step: there is no such attribute",
    ),
    Mutation(
        "v1/request.py",
        "    @property\n    def num_tokens(self)",
        "    def num_tokens(self)",
        "vllm.v1.request.Request.num_tokens: is a method now, not an attribute",
    ),
    Mutation(
        "v1/request.py",
        "        self,\n        token_ids: int | list[int],\n",
        "        self,\n        *,\n        token_ids: int | list[int],\n",
        "vllm.v1.request.Request.append_output_token_ids: takes token_ids by name only",
    ),
    Mutation(
        "v1/core/kv_cache_manager.py",
        "        new_computed_blocks: KVCacheBlocks | None = None,\n",
        "",
        "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots: "
        "has no parameter new_computed_blocks",
    ),
    Mutation(
        "v1/core/kv_cache_manager.py",
        "def cache_blocks(self, request: Request, num_computed_tokens: int)",
        "def cache_blocks(self, num_computed_tokens: int, request: Request)",
        "vllm.v1.core.kv_cache_manager.KVCacheManager.cache_blocks: "
        "takes (num_computed_tokens, request) in this order, not (request, num_computed_tokens)",
    ),
    Mutation(
        "v1/core/kv_cache_manager.py",
        "allow_none: bool = False,\n",
        "none_allowed: bool = False,\n",
        "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids: has no parameter allow_none",
    ),
    Mutation(
        "v1/executor/abstract.py",
        "self, scheduler_output: SchedulerOutput, non_block: bool = False",
        "self, scheduler_output: SchedulerOutput, rank: int, non_block: bool = False",
        "vllm.v1.executor.Executor.execute_model: needs rank, which we do not know",
    ),
    Mutation(
        "v1/core/sched/output.py",
        "    new_block_ids_to_zero: list[int] | None = None\n",
        "",
        "vllm.v1.core.sched.output.SchedulerOutput.new_block_ids_to_zero: "
        "there is no such attribute",
    ),
    Mutation(
        "v1/core/sched/output.py",
        "    lora_request: LoRARequest | None\n",
        "    lora_request: LoRARequest | None\n    tenant: str\n",
        "vllm.v1.core.sched.output.NewRequestData: needs tenant, which we do not know",
    ),
    Mutation(
        "v1/outputs.py",
        "class DraftTokenIds",
        "class DraftTokens",
        "vllm.v1.outputs.DraftTokenIds: there is no such name",
    ),
    Mutation(
        "v1/worker/cpu_model_runner.py",
        "class CPUModelRunner(GPUModelRunner)",
        "class CPUModelRunner(LoRAModelRunnerMixin)",
        "vllm.v1.worker.cpu_model_runner.CPUModelRunner: "
        "does not inherit from vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    ),
    Mutation(
        "v1/worker/gpu_input_batch.py",
        "        self.num_tokens_no_spec = ",
        "        self.num_tokens_verified = ",
        "vllm.v1.worker.gpu_input_batch.InputBatch.num_tokens_no_spec: there is no such attribute",
    ),
    Mutation(
        "v1/sample/rejection_sampler.py",
        "apply_top_k_top_p(logits, top_k, top_p)",
        "apply_top_k_top_p(logits, top_k, top_p, out=None)",
        "vllm.v1.sample.rejection_sampler.apply_top_k_top_p: is called in a way that ours does "
        "not know: apply_top_k_top_p(logits, top_k, top_p, out=None)",
    ),
    Mutation(
        "config/speculative.py",
        '"custom_class"',
        '"own_class"',
        "vllm.config.speculative: does not know 'custom_class'",
    ),
    Mutation(
        "engine/arg_utils.py",
        "    logprobs_mode: LogprobsMode = ",
        "    mode_of_logprobs: LogprobsMode = ",
        "vllm.engine.arg_utils.EngineArgs.logprobs_mode: there is no such attribute",
    ),
    Mutation(
        "envs.py",
        '"VLLM_CPU_KVCACHE_SPACE"',
        '"VLLM_CPU_CACHE_SPACE"',
        "vllm.envs.VLLM_CPU_KVCACHE_SPACE: there is no such name",
    ),
    Mutation(
        "platforms/interface.py",
        "def is_cuda_alike(",
        "def is_like_cuda(",
        "vllm.platforms.Platform.is_cuda_alike: there is no such method",
    ),
    Mutation(
        "entrypoints/llm.py",
        "        model: str,\n        *,\n        runner: RunnerOption",
        "        target: str,\n        *,\n        runner: RunnerOption",
        "vllm.LLM.__init__: has no parameter model; needs target, which we do not know",
    ),
]
REMOVED = "v1/core/block_pool.py"
REMOVED_LINE = "vllm.v1.core.block_pool.BlockPool: its module cannot be found, or not be read"


@pytest.mark.parametrize("release", RELEASES)
def test_each_change_is_named_and_nothing_else(release: str, tmp_path: Path) -> None:
    """All at once: the list has to be complete, so that it need not be made in many starts."""
    root, changed = sources(release), dict[str, str | None]({REMOVED: None})
    for file, old, new, _ in MUTATIONS:
        text = changed.get(file) or (root / file).read_text("utf-8")
        assert old in text, (file, old)
        changed[file] = text.replace(old, new)
    overlay(root, tmp_path / "vllm", changed)
    named = {mutation.line for mutation in MUTATIONS} | {REMOVED_LINE}
    # The overriding of LLM.__init__ is broken by what breaks calling it.
    named.add("vllm.LLM.__init__: has no parameter model")
    assert set(contract.check(tmp_path / "vllm")) == named


def overlay(root: Path, copy: Path, changed: dict[str, str | None]) -> None:
    """Make `copy` look like `root`, but for some files, by links to all that is as it was."""
    copy.mkdir()
    for entry in root.iterdir():
        inside = {
            file.partition("/")[2]: text
            for file, text in changed.items()
            if file.partition("/")[0] == entry.name
        }
        if not inside:
            (copy / entry.name).symlink_to(entry)
        elif entry.is_dir():
            overlay(entry, copy / entry.name, inside)
        elif (text := inside[""]) is not None:
            (copy / entry.name).write_text(text, "utf-8")


# --- the checker on small sources ------------------------------------------------------------


def problems(tmp_path: Path, files: dict[str, str], key: str, hook: Hook) -> list[str]:
    root = tmp_path / "vllm"
    for name, text in {"__init__.py": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return violations(root, {key: hook})


BASE = "class Base:\n  def __init__(self, a, b=1):\n    self.x, (self.y, z) = a\n"
LAZY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from vllm.a import Base\n"


@pytest.mark.parametrize(
    ("files", "key", "hook"),
    [
        ({"a.py": BASE}, "vllm.a:Base", Class("x y", new="(a, b)")),
        ({"a.py": BASE}, "vllm.a:Base", Class("x y", new="(a, b=)")),
        ({"a.py": BASE}, "vllm.a:Base", Class(new="(a)", overrides=("__init__(a, *)",))),
        # inherited, over a relative import, an alias, a module and a generic base
        (
            {"p/a.py": BASE, "p/__init__.py": "from .a import Base as Root", "b.py": ""}
            | {"c.py": "from vllm.p import Root\nclass C(Root[int]):\n  pass\n"},
            "vllm.c:C",
            Class("x", base="vllm.p.a:Base"),
        ),
        (
            {"a.py": BASE, "c.py": "import vllm.a as m\nclass C(m.Base, m.Nothing):\n  pass\n"},
            "vllm.c:C",
            Class("x", new="(a)", base="vllm.a:Base"),
        ),
        # what only type checkers see is there if the module can make it on demand
        ({"a.py": BASE, "c.py": f"{LAZY}__all__ = ['Base']\n"}, "vllm.c:Base", Class("y")),
        # properties are attributes, overloads and abstract methods are not there
        (
            {"a.py": "class A:\n  @cached_property\n  def p(self): ...\n"},
            "vllm.a:A",
            Class("p"),
        ),
        (
            {
                "a.py": "class A:\n  @overload\n  def f(self, b): ...\n"
                "  def f(self, a, /, *more, c, **rest): ...\n"
            },
            "vllm.a:A",
            Class(calls=("f(a, b, c=, d=)",)),
        ),
        # dataclasses, named tuples and structs take their fields, the inherited ones first
        (
            {
                "a.py": "@dataclass\nclass A:\n  a: int\n  k: ClassVar[int]\n"
                "@dataclass(kw_only=False)\nclass B(A):\n  b: list = field(default_factory=list)\n"
            },
            "vllm.a:B",
            Class("a b", new="(a, b)", is_dataclass=True),
        ),
        ({"a.py": "if 1:\n  def f(a, *, b=0): ...\n"}, "vllm.a:f", Function("(a)")),
        ({"a.py": "try:\n  x: int = 1\nexcept E:\n  pass\n"}, "vllm.a:x", Name()),
        (
            {"a.py": "class A:\n  @staticmethod\n  def f(a): ...\n"},
            "vllm.a:A",
            Class(calls=("f(a)",)),
        ),
        (
            {"a.py": "class A:\n  @classmethod\n  def f(c, a): ...\n"},
            "vllm.a:A",
            Class(calls=("f(a)",)),
        ),
        ({"a.py": "x = {'word': 1}\n"}, "vllm.a", Texts(("word",))),
        (
            {"a.py": "class A:\n  def f(self, r):\n    return 1 in self.s or self.s.pop() + r.t\n"},
            "vllm.a:A",
            Class(reads="t", stand_ins={"s": "pop __contains__"}),
        ),
    ],
)
def test_what_is_there_is_found(
    files: dict[str, str], key: str, hook: Hook, tmp_path: Path
) -> None:
    assert problems(tmp_path, files, key, hook) == []


@pytest.mark.parametrize(
    ("source", "hook", "problem"),
    [
        ("def A(", Class(), ": its module cannot be found, or not be read"),
        ("B = 1\n", Class(), ": there is no such name"),
        ("A = 1\n", Class(), ": is not a class"),
        ("A = 1\n", Function("()"), ": is not a function"),
        ("from os import A\n", Class(), ": its definition is not in vLLM"),
        (f"{LAZY.replace('Base', 'A')}", Class(), ": there is no such name"),
        ("class A:\n  f = 1\n", Class(calls=("f()",)), ".f: is an attribute now, not a method"),
        (
            "class A:\n  @abstractmethod\n  def f(self): ...\n",
            Class(calls=("f()",)),
            ".f: there is no such method",
        ),
        ("class A:\n  x = 1\n", Class(base="vllm.a:B"), ": does not inherit from vllm.a.B"),
        (
            "@dataclass(frozen=True)\nclass A:\n  x: int\n",
            Class(is_dataclass=True),
            ": is not a dataclass that can be changed",
        ),
        ("def A(a, b): ...\n", Function("(a)"), ": needs b, which we do not know"),
        ("def A(a, *, b): ...\n", Function("(a)"), ": needs b, which we do not know"),
        ("def A(a, *, b): ...\n", Function("(a, b)"), ": takes b by name only"),
        ("def A(a): ...\n", Function("(a, b=)"), ": has no parameter b"),
        (
            "def A(a, n=0, b=0): ...\n",
            Function("(a, b)"),
            ": takes (a, n) in this order, not (a, b)",
        ),
        (
            "def A(a, c): ...\n",
            Function("(a, b)"),
            ": has no parameter b; needs c, which we do not know",
        ),
        (
            "class A:\n  def f(self, a, **rest): ...\n",
            Class(overrides=("f(a)",)),
            ".f: takes **kwargs now, which ours does not",
        ),
        (
            "def A(a, b=0): ...\nx = A(1)\nx = A(*x)\n",
            Function("(a)", replaced=True),
            ": is called in a way that ours does not know: A(*x)",
        ),
        (
            "class A:\n  def f(self):\n    for x in self.s: pass\n",
            Class(stand_ins={"s": "pop"}),
            ".s: is used by For, which our stand-in has not",
        ),
    ],
)
def test_what_is_wrong_is_said(source: str, hook: Hook, problem: str, tmp_path: Path) -> None:
    assert problems(tmp_path, {"a.py": source}, "vllm.a:A", hook) == [f"vllm.a.A{problem}"]


# --- at start-up -----------------------------------------------------------------------------


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> "FakeInstallation":
    return FakeInstallation(monkeypatch)


class FakeInstallation:
    """A vLLM of any version, under any name, with any hooks missing."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.version: str | None = "0.33.1"
        self.distribution = "vllm"
        self.missing: list[str] = []
        patch.delenv(contract.ENV_ANY_VLLM, raising=False)
        patch.setattr(contract, "version", self._version)
        patch.setattr(contract, "_check_once", lambda root: self.missing)

    def _version(self, distribution: str) -> str:
        if distribution != self.distribution or self.version is None:
            raise PackageNotFoundError(distribution)
        return self.version


@pytest.mark.parametrize("version", ["0.32.0", "0.33.9+cu129", "0.33.0rc2"])
@pytest.mark.parametrize("distribution", contract.DISTRIBUTIONS)
def test_a_supported_release_is_taken(
    version: str, distribution: str, release: FakeInstallation
) -> None:
    release.version, release.distribution = version, distribution
    contract.ensure()


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.34.0rc1", "1.0.0", "dev", None])
def test_another_release_is_refused_unless_one_insists(
    version: str | None, release: FakeInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    release.version = version
    with pytest.raises(ContractError) as error:
        contract.ensure()
    message = str(error.value)
    assert f"vLLM {version or 'of unknown version'}, MineDraft supports vLLM>=0.32,<0.34" in message
    assert "hooks missing or changed: none of" in message
    assert "MINEDRAFT_ANY_VLLM=1" in message
    assert len(message.splitlines()) == 1
    monkeypatch.setenv(contract.ENV_ANY_VLLM, "1")
    contract.ensure()


@pytest.mark.parametrize("insists", ["0", "1"])
def test_a_release_without_our_hooks_is_refused_always(
    insists: str, release: FakeInstallation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(contract.ENV_ANY_VLLM, insists)
    release.missing = ["vllm.a.B: is gone", "vllm.a.C: is gone"]
    with pytest.raises(ConfigError) as error:
        contract.ensure()
    head, *lines, advice = str(error.value).splitlines()
    assert re.fullmatch(
        r"this is vLLM 0\.33\.1, MineDraft supports vLLM>=0\.32,<0\.34; "
        r"hooks missing or changed: 2 of \d+:",
        head,
    )
    assert lines == ["  vllm.a.B: is gone", "  vllm.a.C: is gone"]
    assert "pip install" in advice


def test_without_vllm_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "find_spec", lambda name: None)
    with pytest.raises(ContractError, match=r"^vLLM is not installed: pip install"):
        contract.ensure()


def test_the_installed_vllm_passes_quickly_without_being_imported() -> None:
    run_alone(
        """
        import time
        from minedraft.verifier import contract
        started = time.process_time()
        contract.ensure()
        first = time.process_time() - started
        contract.ensure()
        again = time.process_time() - started - first
        assert first < 3 and again < 0.1, (first, again)
        assert "vllm" not in sys.modules
        """
    )


def test_the_range_is_that_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    wanted = [name for name in extras["cpu"] + extras["gpu"] if name.startswith("vllm")]
    assert {name.lstrip("-clpmuv") for name in wanted} == {contract._RANGE}


@pytest.mark.parametrize(
    ("file", "function", "before"),
    [
        ("verifier/scheduler.py", "__init__", "check_target"),
        ("llm.py", "__init__", "class_options"),
        ("commands/generate.py", "_generate", "generate"),
        ("commands/drafter.py", "_drafter", "run"),
        ("commands/serve.py", "_serve", "run"),
    ],
)
def test_it_is_checked_before_anything_is_put_in(file: str, function: str, before: str) -> None:
    tree = ast.parse((ROOT / "src/minedraft" / file).read_text())
    (definition,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function and before in ast.dump(node)
    )
    assert definition.end_lineno is not None
    calls = {ast.unparse(c.func): c.lineno for c in ast.walk(definition) if isinstance(c, ast.Call)}
    assert calls["contract.ensure"] < min(
        line for name, line in calls.items() if name.endswith(before)
    )


# --- the plugin ------------------------------------------------------------------------------


def test_the_plugin_adds_a_name_to_vllms_models_and_changes_nothing_else() -> None:
    """It is loaded into every process of every vLLM here, baselines too."""
    run_alone(
        """
        import types

        class Registry:
            models = {}
            def register_model(self, architecture, model):
                self.models[architecture] = model

        class Untouchable(types.ModuleType):
            def __getattribute__(self, name):
                if name == "ModelRegistry":
                    return Registry()
                if name in ("__spec__", "__path__"):  # what an import looks at
                    raise AttributeError(name)
                raise AssertionError(f"vllm.{name} is read")
            def __setattr__(self, name, value):
                raise AssertionError(f"vllm.{name} is set")

        sys.modules["vllm"] = Untouchable("vllm")
        from minedraft.verifier import plugin
        before = set(sys.modules)
        assert plugin.register() is None
        assert set(sys.modules) == before
        assert [name for name in before if name.startswith("vllm.")] == []
        model = "minedraft.emulation.model:EmulatedForCausalLM"
        assert Registry.models == {"MineDraftEmulatedForCausalLM": model}
        """
    )


def test_our_classes_come_in_by_the_options_that_name_them_only() -> None:
    run_alone(
        """
        from minedraft.config import MineDraftConfig
        from minedraft.verifier.plugin import class_options, register
        register()
        ours = {"minedraft.verifier." + name for name in ("scheduler", "worker", "proposer")}
        assert not (ours | {"minedraft.emulation.model"}) & set(sys.modules)
        options = class_options(MineDraftConfig(), 3)
        proposer = options["speculative_config"]["model"]
        named = {options["scheduler_cls"], options["worker_cls"], proposer}
        assert {name.rpartition(".")[0] for name in named} == ours
        assert not ours & set(sys.modules)
        """
    )


def run_alone(program: str) -> None:
    """Run a program in a process of its own, which has not imported anything yet."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
