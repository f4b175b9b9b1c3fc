"""Compares what we use of vLLM, as contract.py lists it, with the source of a vLLM."""

import ast
import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from minedraft.verifier.contract_source import (
    ClassSource,
    Found,
    FunctionNode,
    Module,
    Signature,
    Sources,
)


@dataclass(frozen=True)
class Function:
    """A function that we call.

    A call is written ``(first, second, named=)``: what we pass by position, under vLLM's names,
    then what we pass by name. ``*`` at the end: and whatever else there is.
    """

    call: str
    replaced: bool = False
    """We put one of our own in its place, for the callers in the module, with these parameters."""


@dataclass(frozen=True)
class Name:
    """Anything else that we import: a variable, an object."""


@dataclass(frozen=True)
class Texts:
    """Strings that mean something to the module, and that we use."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Class:
    """What we use of a class and its objects; names in one string are separated by spaces."""

    attributes: str = ""
    """What we read or set, properties too."""
    calls: tuple[str, ...] = ()
    """Methods that we call, each as ``name(parameters)``; see Function."""
    overrides: tuple[str, ...] = ()
    """Methods that we define anew, with all their parameters."""
    new: str | None = None
    """How we make one: the parameters."""
    adds: str = ""
    """Names of our own in our subclass, which must not be in use."""
    reads: str = ""
    """Attributes of any object that this class must still look at, or our setting them is void."""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Attributes that we replace by objects which know these methods only."""
    base: str | None = None
    """A class that it inherits from, as ``module:name``."""
    is_dataclass: bool = False
    """We extend it, copy it or list its fields as a dataclass."""

    def names(self) -> set[str]:
        """The members that we use."""
        methods = {call.partition("(")[0] for call in self.calls + self.overrides}
        return methods.union(self.attributes.split())


Hook = Class | Function | Name | Texts
Contract = Mapping[str, Hook]


def violations(root: Path, contract: Contract) -> list[str]:
    """Each hook that is not in the vLLM whose package folder is ``root``: its name, and why."""
    with _without_collector():
        return _violations(Sources(root), contract)


def num_hooks(contract: Contract) -> int:
    """How many names the contract holds, each member of a class for itself."""
    return sum(
        1 + len(hook.names()) if isinstance(hook, Class) else 1 for hook in contract.values()
    )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Syntax trees are many objects and no garbage: collecting would double the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _violations(sources: Sources, contract: Contract) -> list[str]:
    return [
        f"{key.replace(':', '.')}{problem}"
        for key, hook in contract.items()
        for problem in _problems(sources, key, hook)
    ]


def _problems(sources: Sources, key: str, hook: Hook) -> Iterator[str]:
    module_name, _, name = key.partition(":")
    module = sources.module(module_name)
    if module is None:
        yield ": its module cannot be found, or not be read"
    elif isinstance(hook, Texts):
        yield from (f": does not know '{text}'" for text in hook.texts if not module.says(text))
    elif not module.has(name):
        yield ": there is no such name"
    elif isinstance(hook, Name):
        return
    elif (found := sources.find(module, name)) is None:
        yield ": its definition is not in vLLM"
    elif isinstance(hook, Function):
        yield from _function_problems(found[1], hook)
        if hook.replaced:
            yield from _caller_problems(module, name, hook.call)
    else:
        yield from _class_problems(sources, found, hook)


def _function_problems(node: ast.stmt, hook: Function) -> Iterator[str]:
    if not isinstance(node, FunctionNode):
        yield ": is not a function"
    else:
        yield from _call_problems("", hook.call, Signature.of(node, bound=False), ours=False)


def _caller_problems(module: Module, name: str, call: str) -> Iterator[str]:
    positional, keywords, takes_all = _arguments(call)
    known = keywords.union(positional)
    for caller in module.calls(name):
        given = {word.arg or "**" for word in caller.keywords}
        many = len(caller.args) > len(positional) or any(
            isinstance(argument, ast.Starred) for argument in caller.args
        )
        if (many or given - known) and not takes_all:
            yield f": is called in a way that ours does not know: {ast.unparse(caller)}"


def _class_problems(sources: Sources, found: Found, hook: Class) -> Iterator[str]:
    module, node = found
    if not isinstance(node, ast.ClassDef):
        yield ": is not a class"
        return
    line = sources.lineage(module, node)
    yield from _relation_problems(sources, line, hook)
    members: dict[str, FunctionNode | None] = {}
    for source in reversed(line):
        members |= source.members
    for name in hook.attributes.split():
        if name not in members:
            yield f".{name}: there is no such attribute"
        elif members[name] is not None:
            yield f".{name}: is a method now, not an attribute"
    for ours, calls in ((False, hook.calls), (True, hook.overrides)):
        for call in calls:
            yield from _method_problems(members, call, ours=ours)
    for name in hook.adds.split():
        if name in members:
            yield f".{name}: exists, and our subclass uses the name for something else"
    if hook.new is not None:
        yield from _call_problems("", hook.new, _constructor(line, members), ours=False)
    yield from _reading_problems(line, hook)


def _relation_problems(sources: Sources, line: list[ClassSource], hook: Class) -> Iterator[str]:
    if hook.is_dataclass and not line[0].is_dataclass:
        yield ": is not a dataclass that can be changed"
    if hook.base is not None:
        module, _, name = hook.base.partition(":")
        base = sources.find(sources.module(module), name)
        if base is None or base[1] not in [source.node for source in line]:
            yield f": does not inherit from {module}.{name}"


def _method_problems(
    members: Mapping[str, FunctionNode | None], call: str, *, ours: bool
) -> Iterator[str]:
    name, parenthesis, parameters = call.partition("(")
    if name not in members:
        yield f".{name}: there is no such method"
    elif (method := members[name]) is None:
        yield f".{name}: is an attribute now, not a method"
    else:
        signature = Signature.of(method, bound=True)
        yield from _call_problems(f".{name}", parenthesis + parameters, signature, ours=ours)


def _constructor(line: list[ClassSource], members: Mapping[str, FunctionNode | None]) -> Signature:
    if method := members.get("__init__"):
        return Signature.of(method, bound=True)
    fields: dict[str, bool] = {}
    for source in reversed(line):
        fields |= dict(source.fields())
    needed = frozenset(name for name, is_needed in fields.items() if is_needed)
    return Signature(positional=tuple(fields), required=needed)


def _reading_problems(line: list[ClassSource], hook: Class) -> Iterator[str]:
    for name in hook.reads.split():
        if not any(name in source.reads for source in line):
            yield f": does not look at .{name} any more, which we set"
    for name, methods in hook.stand_ins.items():
        known = set(methods.split())
        for source in line:
            for around in source.reads.get(name, ()):
                if unknown := _use(around) - known:
                    yield f".{name}: is used by {unknown.pop()}, which our stand-in has not"


def _use(around: ast.AST) -> set[str]:
    """The methods that an expression calls on the object in the middle of it."""
    match around:
        case ast.Attribute(attr=name):
            return {name}
        case ast.Compare(ops=[ast.In() | ast.NotIn()]):
            return {"__contains__"}
    return {type(around).__name__}


def _call_problems(where: str, call: str, signature: Signature, *, ours: bool) -> Iterator[str]:
    """At most one line: in what a call of ours, or of ``ours``, does not fit."""
    positional, keywords, passes_all = _arguments(call)
    reasons = [*_misplaced(positional, signature), *_missing(positional, keywords, signature)]
    if not passes_all:
        known = keywords.union(positional)
        if unpassed := [name for name in signature.names if name in signature.required - known]:
            reasons.append(f"needs {', '.join(unpassed)}, which we do not know")
        elif ours and (new := [name for name in signature.arguments if name not in known]):
            reasons.append(f"takes {', '.join(new)} now, which ours does not")
    if reasons:
        yield f"{where}: {'; '.join(reasons)}"


def _arguments(call: str) -> tuple[tuple[str, ...], set[str], bool]:
    """What a call passes by position, by name, and whether there is more."""
    words = re.findall(r"\*|\w+=?", call)
    positional = tuple(word for word in words if word[-1] not in "*=")
    return positional, {word[:-1] for word in words if word[-1] == "="}, "*" in words


def _missing(
    positional: tuple[str, ...], keywords: set[str], signature: Signature
) -> Iterator[str]:
    gone = [name for name in positional if name not in signature.names]
    if gone and not signature.any_positional:
        yield f"has no parameter {', '.join(gone)}"
    unknown = sorted(keywords.difference(signature.names))
    if unknown and not signature.any_keyword:
        yield f"has no parameter {', '.join(unknown)}"


def _misplaced(positional: tuple[str, ...], signature: Signature) -> Iterator[str]:
    if by_name := [name for name in positional if name in signature.keyword_only]:
        yield f"takes {', '.join(by_name)} by name only"
    elif set(positional) <= set(signature.positional):
        begin = signature.positional[: len(positional)]
        if begin != positional:
            yield f"takes ({', '.join(begin)}) in this order, not ({', '.join(positional)})"
