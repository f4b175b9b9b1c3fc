"""The contract is complete: all that our source uses of vLLM is in it, and nothing else.

Our source is read, not imported. Where it does not say of what class a value is, it is known by
its name, as listed here; what has another name is not seen.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

from minedraft.config import MineDraftConfig
from minedraft.verifier.contract import CONTRACT
from minedraft.verifier.contract_check import Class, Function, Texts
from minedraft.verifier.plugin import class_options

SOURCE = Path(__file__).parents[2] / "src/minedraft"
ABOUT_THE_CONTRACT = {"contract.py", "contract_check.py", "contract_source.py"}

REQUEST = "vllm.v1.request:Request"
SCHEDULER_OUTPUT = "vllm.v1.core.sched.output:SchedulerOutput"
RUNNER_OUTPUT = "vllm.v1.outputs:ModelRunnerOutput"
KV_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
REQUEST_STATES = "vllm.v1.worker.gpu.states:RequestState"
STAGED = "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor"
ROW_STATE = "vllm.v1.worker.gpu_input_batch:CachedRequestState"
BATCH = "vllm.v1.worker.gpu_input_batch:InputBatch"
VLLM_CONFIG = "vllm.config:VllmConfig"
MODEL_CONFIG = "vllm.config:ModelConfig"

# Of what class a variable is, by file.
VARIABLES = {
    "verifier/scheduler.py": {
        "request": REQUEST,
        "r": REQUEST,
        "params": "vllm:SamplingParams",
        "scheduler_output": SCHEDULER_OUTPUT,
        "model_runner_output": RUNNER_OUTPUT,
        "vllm_config": VLLM_CONFIG,
    },
    "verifier/runner_choice.py": {"vllm_config": VLLM_CONFIG},
    "verifier/refusals.py": {"c": VLLM_CONFIG, "spec": "vllm.config:SpeculativeConfig"},
    "verifier/slots.py": {
        "runner": RUNNER_V2,
        "scheduler_output": SCHEDULER_OUTPUT,
        "input_batch": "vllm.v1.worker.gpu.input_batch:InputBatch",
    },
    "verifier/worker.py": {"output": "vllm.v1.worker.gpu.async_utils:AsyncOutput"},
    "rows.py": {"runner": RUNNER, "scheduler_output": SCHEDULER_OUTPUT, "state": ROW_STATE},
    "drafter/runner_v1.py": {
        "runner": RUNNER,
        "step": SCHEDULER_OUTPUT,
        "state": ROW_STATE,
        "batch": BATCH,
    },
    "drafter/runner_v2.py": {
        "runner": RUNNER_V2,
        "step": SCHEDULER_OUTPUT,
        "states": REQUEST_STATES,
        "lengths": STAGED,
        "computed": STAGED,
        "output": "vllm.v1.worker.gpu.async_utils:AsyncOutput",
    },
    "drafter/steps.py": {
        "step": SCHEDULER_OUTPUT,
        "following": SCHEDULER_OUTPUT,
        "new": "vllm.v1.core.sched.output:NewRequestData",
        "cached": "vllm.v1.core.sched.output:CachedRequestData",
        "rows": "vllm.v1.core.sched.output:CachedRequestData",
    },
    "drafter/worker.py": {"scheduler_output": SCHEDULER_OUTPUT},
    "drafter/engine.py": {
        "request": REQUEST,
        "step": SCHEDULER_OUTPUT,
        "output": RUNNER_OUTPUT,
        "known": "vllm.v1.core.sched.output:CachedRequestData",
        "blocks": "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
        "cache": "vllm.v1.kv_cache_interface:KVCacheConfig",
        "group": "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
        "engine_args": "vllm.engine.arg_utils:EngineArgs",
        "args": "vllm.engine.arg_utils:EngineArgs",
        "config": VLLM_CONFIG,
        "model": MODEL_CONFIG,
        "parallel": "vllm.config:ParallelConfig",
    },
    "emulation/model.py": {
        "vllm_config": VLLM_CONFIG,
        "model": MODEL_CONFIG,
        "compilation": "vllm.config:CompilationConfig",
        "context": "vllm.forward_context:ForwardContext",
        "metadata": "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata",
    },
    "beside.py": {"model_config": MODEL_CONFIG},
    "doctor_models.py": {"config": VLLM_CONFIG},
    "llm.py": {
        "target": VLLM_CONFIG,
        "engine_core": "vllm.v1.engine.core_client:MPClient",
    },
    "serve.py": {
        "target": VLLM_CONFIG,
        "command": "vllm.entrypoints.cli.serve:ServeSubcommand",
        "parser": "vllm.utils.argparse_utils:FlexibleArgumentParser",
        "flags": "vllm.utils.argparse_utils:FlexibleArgumentParser",
    },
    "tokenizers.py": {"model_config": MODEL_CONFIG},
    "engine_options.py": {"parser": "vllm.utils.argparse_utils:FlexibleArgumentParser"},
    "distill/answering.py": {
        "llm": "vllm:LLM",
        "output": "vllm:RequestOutput",
        "found": "vllm.logprobs:FlatLogprobs",
    },
    "demo/answer.py": {"llm": "vllm:LLM", "output": "vllm:RequestOutput"},
    "offline.py": {
        "llm": "vllm:LLM",
        "tokenizer": "vllm.tokenizers:TokenizerLike",
        "output": "vllm:RequestOutput",
        "completion": "vllm:CompletionOutput",
        "entry": "vllm.logprobs:Logprob",
    },
}
# Of what class an attribute is, wherever it is.
ATTRIBUTES = {
    "attn": "vllm.model_executor.layers.attention:Attention",
    "all_token_ids": STAGED,
    "prefill_len": "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor",
    "_command": "vllm.entrypoints.cli.serve:ServeSubcommand",
    "_core": "vllm.v1.engine.core:EngineCore",
    "_executor": "vllm.v1.executor:Executor",
    "_kv": KV_MANAGER,
    "block_pool": "vllm.v1.core.block_pool:BlockPool",
    "compilation_config": "vllm.config:CompilationConfig",
    "cudagraph_mode": "vllm.config.compilation:CUDAGraphMode",
    "req_states": REQUEST_STATES,
    "input_batch": BATCH,
    "kv_cache_config": "vllm.v1.kv_cache_interface:KVCacheConfig",
    "kv_cache_spec": "vllm.v1.kv_cache_interface:KVCacheSpec",
    "llm_engine": "vllm.v1.engine.llm_engine:LLMEngine",
    "logprobs": "vllm.v1.outputs:LogprobsLists",
    "model_config": MODEL_CONFIG,
    "lora_config": "vllm.config.lora:LoRAConfig",
    "lora_request": "vllm.lora.request:LoRARequest",
    "model_runner": RUNNER,
    "parallel_config": "vllm.config:ParallelConfig",
    "reasoning_config": "vllm.config:ReasoningConfig",
    "request": REQUEST,
    "sampling_params": "vllm:SamplingParams",
    "scheduled_cached_reqs": "vllm.v1.core.sched.output:CachedRequestData",
    "scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
    "scheduler_config": "vllm.config:SchedulerConfig",
    "speculative_config": "vllm.config:SpeculativeConfig",
}
# Of what class the items of an attribute are.
ITEMS = {"outputs": "vllm:CompletionOutput", "requests": REQUEST}
# What these names stand for, which is made on demand.
OBJECTS = {
    "vllm.platforms:current_platform": "vllm.platforms:Platform",
    "vllm:ModelRegistry": "vllm.model_executor.models.registry:_ModelRegistry",
}
SAME = {"vllm:EngineArgs": "vllm.engine.arg_utils:EngineArgs"}
# Methods that are not vLLM's but Python's.
INHERITED = {
    ("vllm.utils.argparse_utils:FlexibleArgumentParser", "add_subparsers"),
    ("vllm.utils.argparse_utils:FlexibleArgumentParser", "get_default"),
}


@dataclass
class File:
    """One file of ours, and what it takes from vLLM."""

    path: Path
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.path.read_text("utf-8"))

    @property
    def name(self) -> str:
        return self.path.relative_to(SOURCE).as_posix()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Names here, and the hooks or modules that they stand for, each by its key."""
        found: dict[str, set[str]] = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and _of_vllm(node.module):
                for alias in node.names:
                    known = found.setdefault(alias.asname or alias.name, set())
                    known.add(f"{node.module}:{alias.name}")
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if _of_vllm(alias.name):
                        found.setdefault(alias.asname or alias.name, set()).add(alias.name)
        return found

    def subclasses(self) -> Iterator[tuple[ast.ClassDef, set[str]]]:
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                bases = set().union(*(self.keys(base) for base in node.bases))
                if bases:
                    yield node, bases

    def keys(self, node: ast.expr) -> set[str]:
        """The hooks that an expression may be."""
        match node:
            case ast.Name(id=name):
                found = self.imports.get(name, set())
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                found = {
                    f"{key.replace(':', '.')}:{attribute}"
                    for key in self.imports.get(name, set())
                    if _is_module(key)
                }
            case _:
                found = set()
        return {SAME.get(key, key) for key in found}

    def classes(self, node: ast.expr) -> set[str]:
        """The vLLM classes that the value of an expression may be of, or that it may be."""
        match node:
            case ast.Name(id=name) if known := VARIABLES.get(self.name, {}).get(name):
                return {known}
            case ast.Name(id=name) if name in self._bases:
                return self._bases[name]
            case ast.Call(func=function):
                return self.classes(function)
            case ast.Subscript(value=ast.Attribute(attr=name)) if name in ITEMS:
                return {ITEMS[name]}
            case ast.Attribute(value=value, attr=name) if name in ATTRIBUTES:
                return {ATTRIBUTES[name]} if self._may_hold_vllms(value) else set()
        keys = {OBJECTS.get(key, key) for key in self.keys(node)}
        return {key for key in keys if isinstance(CONTRACT.get(key), Class)}

    @cached_property
    def _bases(self) -> dict[str, set[str]]:
        return {subclass.name: bases for subclass, bases in self.subclasses()}

    def _may_hold_vllms(self, value: ast.expr) -> bool:
        match value:
            case ast.Name(id="self" | "held") | ast.Attribute(attr="handle"):
                return bool(self.imports)
        return bool(self.classes(value))


def _of_vllm(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "vllm"


def _is_module(key: str) -> bool:
    name = key.replace(":", ".")
    return key == "vllm" or any(hook.partition(":")[0] == name for hook in CONTRACT)


FILES = [File(path) for path in sorted(SOURCE.rglob("*.py")) if path.name not in ABOUT_THE_CONTRACT]


def where(file: File, node: ast.expr | ast.stmt) -> str:
    return f"{file.name}:{node.lineno}: {ast.unparse(node).splitlines()[0]}"


def test_every_import_is_in_the_contract() -> None:
    missing = [
        f"{file.name}: {key}"
        for file in FILES
        for keys in file.imports.values()
        for key in keys
        if key not in CONTRACT and not _is_module(key)
    ]
    assert missing == []


def test_every_name_in_an_imported_module_is_in_the_contract() -> None:
    missing = [
        where(file, node)
        for file in FILES
        for node in file.nodes
        if isinstance(node, ast.Attribute) and not file.keys(node) <= CONTRACT.keys() | SAME.keys()
    ]
    assert missing == []


def test_every_environment_variable_is_in_the_contract() -> None:
    used = {
        name for file in FILES for name in re.findall(r"VLLM_[A-Z0-9_]+", file.path.read_text())
    }
    assert used == {key.partition(":")[2] for key in CONTRACT if key.startswith("vllm.envs:")}


def test_every_option_that_makes_a_verifier_is_in_the_contract() -> None:
    options = class_options(MineDraftConfig(), 3)
    assert options.keys() <= _class("vllm.engine.arg_utils:EngineArgs").names()
    speculative = options["speculative_config"]
    assert speculative.keys() <= _class("vllm.config:SpeculativeConfig").names()
    methods = CONTRACT["vllm.config.speculative"]
    assert isinstance(methods, Texts)
    assert speculative["method"] in methods.texts


def test_every_attribute_of_a_vllm_object_is_in_the_contract() -> None:
    missing = [
        f"{where(file, node)} of {key}"
        for file in FILES
        for node in file.nodes
        if isinstance(node, ast.Attribute)
        for key in file.classes(node.value)
        if (key, node.attr) not in INHERITED
        and node.attr not in _class(key).names() | set(_class(key).adds.split())
    ]
    assert missing == []


def test_every_call_is_one_that_the_contract_knows() -> None:
    wrong = [
        where(file, node)
        for file in FILES
        for node in file.nodes
        if isinstance(node, ast.Call)
        for shape in _shapes(file, node)
        if not _fits(node, shape)
    ]
    assert wrong == []


def _shapes(file: File, call: ast.Call) -> Iterator[str]:
    """How the contract says that we call what is called here."""
    for key in file.keys(call.func) & CONTRACT.keys():
        hook = CONTRACT[key]
        if isinstance(hook, Function):
            yield hook.call
        elif isinstance(hook, Class):
            yield hook.new or ""
    if isinstance(call.func, ast.Attribute):
        for key in file.classes(call.func.value):
            hook = _class(key)
            shapes = [s for s in hook.calls if s.partition("(")[0] == call.func.attr]
            yield from shapes or (["*"] if call.func.attr in hook.adds else [])


def _fits(call: ast.Call, shape: str) -> bool:
    words = re.findall(r"\*|\w+=?", shape.partition("(")[2])
    if "*" in words:
        return True
    positional = [word for word in words if word[-1] != "="]
    given = {word.arg for word in call.keywords if word.arg}
    return len(call.args) <= len(positional) and given <= {word.rstrip("=") for word in words}


def test_every_function_that_we_replace_is_in_the_contract() -> None:
    replaced = set()
    for file in FILES:
        functions = {node.name: node for node in file.nodes if isinstance(node, ast.FunctionDef)}
        for node in file.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Patch":
                given = {word.arg: word.value for word in node.keywords}
                (module,) = file.imports[ast.unparse(given["module"])]
                key = f"{module.replace(':', '.')}:{ast.literal_eval(given['name'])}"
                ours = functions[ast.unparse(given["replacement"])]
                shape = f"({', '.join(arg.arg for arg in ours.args.args)})"
                assert CONTRACT[key] == Function(shape, replaced=True)
                replaced.add(key)
    assert replaced == {
        key for key, hook in CONTRACT.items() if isinstance(hook, Function) and hook.replaced
    }


def _class(key: str) -> Class:
    hook = CONTRACT[key]
    assert isinstance(hook, Class), key
    return hook


SUBCLASSES = [
    pytest.param(file, node, key, id=f"{node.name}-{key.partition(':')[2]}")
    for file in FILES
    for node, bases in file.subclasses()
    for key in sorted(bases)
]


def _methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "node", "key"), SUBCLASSES)
def test_every_method_that_we_override_is_in_the_contract(
    file: File, node: ast.ClassDef, key: str
) -> None:
    overrides = {shape.partition("(")[0]: shape for shape in _class(key).overrides}
    ours = _methods(node)
    if node.name == "MineDraftScheduler":
        assert overrides.keys() <= ours.keys()
    for name in ours.keys() & overrides.keys():
        given = ours[name].args
        words = re.findall(r"\*|\w+", overrides[name].partition("(")[2])
        assert [arg.arg for arg in given.args[1:]] == [word for word in words if word != "*"]
        assert ("*" in words) == (given.kwarg is not None)


@pytest.mark.parametrize(("file", "node", "key"), SUBCLASSES)
def test_every_name_of_self_is_ours_or_in_the_contract(
    file: File, node: ast.ClassDef, key: str
) -> None:
    hook = _class(key)
    overrides = {shape.partition("(")[0] for shape in hook.overrides}
    used = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self"
    }
    fields = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    ours = (used | _methods(node).keys() | fields) - hook.names()
    assert ours <= set(hook.adds.split())
    through_super = set(re.findall(r"super\(\)\.(\w+)", ast.unparse(node)))
    assert through_super <= overrides


def test_nothing_is_in_the_contract_that_we_do_not_use() -> None:
    """By name alone: that it is used on an object of the class is not certain."""
    words = set().union(*(_words(file) for file in FILES))
    unused = [
        f"{key}: {name}"
        for key, hook in CONTRACT.items()
        if isinstance(hook, Class)
        for name in hook.names()
        if name not in words
    ]
    assert unused == []
    assert [name for name in [*SAME, *OBJECTS.values()] if name not in CONTRACT] == []


def _words(file: File) -> set[str]:
    words: set[str] = set()
    for node in file.nodes:
        match node:
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.FunctionDef(name=name):
                words.add(name)
            case ast.Constant(value=str(text)):
                words.update(re.findall(r"\w+", text))
    return words


def test_the_names_listed_here_are_in_use() -> None:
    used = {
        file.name: {node.id for node in file.nodes if isinstance(node, ast.Name)}
        | {node.arg for node in file.nodes if isinstance(node, ast.arg)}
        for file in FILES
    }
    stale = [
        f"{name}: {variable}"
        for name, variables in VARIABLES.items()
        for variable in variables
        if variable not in used.get(name, set())
    ]
    assert stale == []
    attributes = {n.attr for file in FILES for n in file.nodes if isinstance(n, ast.Attribute)}
    assert sorted(ATTRIBUTES.keys() - attributes) == []
