"""vLLM's source as the contract sees it: names, classes and signatures, read without an import."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Found = tuple["Module", ast.stmt]
"""A definition, and the module that it is in."""


@dataclass(frozen=True)
class Imported:
    """A name that a module takes from another one; without ``name`` it is that module."""

    module: str
    name: str | None = None


@dataclass(frozen=True)
class Signature:
    """The parameters of a function, of a method without ``self``."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    any_positional: bool = False
    any_keyword: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters that have a name."""
        return self.positional + self.keyword_only

    @property
    def arguments(self) -> tuple[str, ...]:
        """All that one can pass: these, and the stars."""
        stars = {"*args": self.any_positional, "**kwargs": self.any_keyword}
        return self.names + tuple(star for star, is_there in stars.items() if is_there)

    @classmethod
    def of(cls, node: FunctionNode, *, bound: bool) -> "Signature":
        """The signature of a function; ``bound``: as one calls it on an object or a class."""
        given = node.args
        positional = [arg.arg for arg in (*given.posonlyargs, *given.args)]
        keyword_only = [arg.arg for arg in given.kwonlyargs]
        required = set(positional[: len(positional) - len(given.defaults)])
        required.update(
            name
            for name, default in zip(keyword_only, given.kw_defaults, strict=True)
            if default is None
        )
        if bound and "staticmethod" not in _decorators(node):
            del positional[0]
        return cls(
            positional=tuple(positional),
            keyword_only=tuple(keyword_only),
            required=frozenset(required.intersection([*positional, *keyword_only])),
            any_positional=given.vararg is not None,
            any_keyword=given.kwarg is not None,
        )


class Module:
    """A module, parsed."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.source = path.read_text("utf-8")
        self._package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.names: dict[str, ast.stmt | Imported] = {}
        """What the module binds at its top level, under ``if`` and ``try`` too."""
        self._unbound: set[str] = set()
        self._tree = ast.parse(self.source)
        for statement in self._tree.body:
            self._bind(statement, for_types=False)

    def has(self, name: str) -> bool:
        """Whether one can import the name.

        What is there for type checkers only has to be made on demand by a ``__getattr__``, which
        keeps the name in some table, as a string.
        """
        return name in self.names and (name not in self._unbound or self.says(name))

    def says(self, text: str) -> bool:
        """Whether this text is a string of the code, not only a part of one."""
        return text in self.source and text in self._strings

    def calls(self, name: str) -> Iterator[ast.Call]:
        """The calls of a function that the module knows by this name."""
        for node in ast.walk(self._tree):
            match node:
                case ast.Call(func=ast.Name(id=called)) as call if called == name:
                    yield call

    @cached_property
    def _strings(self) -> set[str]:
        constants = (node for node in ast.walk(self._tree) if isinstance(node, ast.Constant))
        return {node.value for node in constants if isinstance(node.value, str)}

    def _bind(self, statement: ast.stmt, *, for_types: bool) -> None:
        for name, bound in self._bindings(statement):
            self.names[name] = bound
            (self._unbound.add if for_types else self._unbound.discard)(name)
        for branch, nested in _branches(statement):
            only_types = branch == "body" and _is_type_checking(statement)
            for inner in nested:
                self._bind(inner, for_types=for_types or only_types)

    def _bindings(self, statement: ast.stmt) -> Iterator[tuple[str, ast.stmt | Imported]]:
        match statement:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name, statement
            case ast.ImportFrom(module=module, names=names, level=level):
                origin = self._absolute(module or "", level)
                for alias in names:
                    yield alias.asname or alias.name, Imported(origin, alias.name)
            case ast.Import(names=names):
                for alias in names:
                    if alias.asname:
                        yield alias.asname, Imported(alias.name)
            case _:
                for target in _targets(statement):
                    if isinstance(target, ast.Name):
                        yield target.id, statement

    def _absolute(self, module: str, level: int) -> str:
        if not level:
            return module
        parts = self._package.split(".")
        return ".".join([*parts[: len(parts) - level + 1], *filter(None, [module])])


@dataclass(frozen=True, eq=False)
class ClassSource:
    """One class, without what it inherits."""

    module: Module
    node: ast.ClassDef

    @cached_property
    def members(self) -> dict[str, FunctionNode | None]:
        """Its methods by name; None for an attribute, and for a property, which looks like one.

        Without what is abstract: that is not there to be called.
        """
        found: dict[str, FunctionNode | None] = dict.fromkeys(self._attributes())
        for method in self._functions():
            decorators = _decorators(method)
            if not decorators & {"overload", "abstractmethod"}:
                found[method.name] = None if decorators & _PROPERTIES else method
        return found

    @cached_property
    def is_dataclass(self) -> bool:
        """Whether ``dataclasses`` takes it as one that others may extend and change."""
        for decorator in self.node.decorator_list:
            if _last_name(decorator) == "dataclass":
                keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
                return not any(word.arg == "frozen" for word in keywords)
        return False

    def fields(self) -> Iterator[tuple[str, bool]]:
        """The fields that its generated constructor takes, and whether it needs each."""
        for statement in self.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if "ClassVar" in ast.dump(statement.annotation):
                    continue
                yield statement.target.id, not _has_default(statement.value)

    @cached_property
    def reads(self) -> dict[str, list[ast.AST]]:
        """The attributes that its code reads, of any object, and the expression around each."""
        found: dict[str, list[ast.AST]] = {}
        todo: list[ast.AST] = [self.node]
        while todo:
            around = todo.pop()
            for node in ast.iter_child_nodes(around):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.setdefault(node.attr, []).append(around)
                todo.append(node)
        return found

    def _functions(self) -> Iterator[FunctionNode]:
        for statement in _statements(self.node.body, functions=False):
            if isinstance(statement, FunctionNode):
                yield statement

    def _attributes(self) -> Iterator[str]:
        for statement in _statements(self.node.body, functions=False):
            for target in _targets(statement):
                if isinstance(target, ast.Name):
                    yield target.id
        for method in self._functions():
            for statement in _statements(method.body, functions=True):
                for target in _targets(statement):
                    if isinstance(target, ast.Attribute) and _last_name(target.value) == "self":
                        yield target.attr


class Sources:
    """The modules of a vLLM, parsed as they are asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """The module; None if there is none that this Python can read."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> Module | None:
        package, *parts = name.split(".")
        if package != "vllm":
            return None
        folder = self._root.joinpath(*parts)
        for path in (folder / "__init__.py", folder.with_suffix(".py")):
            if path.is_file():
                try:
                    return Module(name, path)
                except (SyntaxError, UnicodeDecodeError):
                    return None
        return None

    def find(self, module: Module | None, name: str) -> Found | None:
        """The definition that a name in a module stands for, wherever it is imported from."""
        while module is not None:
            match module.names.get(name):
                case None:
                    return None
                case Imported(module=origin, name=str(original)):
                    module, name = self.module(origin), original
                case Imported():
                    return None
                case ast.Assign(value=ast.Name(id=original)) if original != name:
                    name = original
                case statement:
                    return module, statement
        return None

    def lineage(self, module: Module, node: ast.ClassDef) -> list[ClassSource]:
        """A class and what it inherits from within vLLM, in the order of look-up."""
        line = [ClassSource(module, node)]
        for base in node.bases:
            found = self._base(module, base)
            if found is not None:
                known = {source.node for source in line}
                line += [source for source in self.lineage(*found) if source.node not in known]
        return line

    def _base(self, module: Module, base: ast.expr) -> tuple[Module, ast.ClassDef] | None:
        match base:
            case ast.Subscript(value=value):
                return self._base(module, value)
            case ast.Name(id=name):
                found = self.find(module, name)
            case ast.Attribute(value=ast.Name(id=alias), attr=name):
                found = self._find_in(module.names.get(alias), name)
            case _:
                return None
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        return found[0], found[1]

    def _find_in(self, alias: ast.stmt | Imported | None, name: str) -> Found | None:
        if not isinstance(alias, Imported):
            return None
        path = alias.module if alias.name is None else f"{alias.module}.{alias.name}"
        return self.find(self.module(path), name)


_PROPERTIES = {"property", "cached_property", "setter", "classproperty"}


def _decorators(node: FunctionNode) -> set[str]:
    return {_last_name(decorator) for decorator in node.decorator_list}


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Call(func=function):
            return _last_name(function)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _has_default(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and _last_name(value) in {"field", "Field"}:
        given = {word.arg for word in value.keywords}
        return bool(value.args) or not given.isdisjoint({"default", "default_factory"})
    return value is not None


def _is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and _last_name(statement.test) == "TYPE_CHECKING"


def _targets(statement: ast.stmt) -> Iterator[ast.expr]:
    """What a statement assigns to."""
    match statement:
        case ast.Assign(targets=targets):
            yield from _flat(targets)
        case ast.AnnAssign(target=target) | ast.For(target=target):
            yield from _flat([target])
        case ast.With(items=items):
            yield from _flat(item.optional_vars for item in items if item.optional_vars)


def _flat(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from _flat(target.elts)
        else:
            yield target


def _branches(statement: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The blocks of an ``if``, a ``try``, a ``with`` or a loop."""
    if isinstance(statement, ast.ClassDef | FunctionNode):
        return
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield name, block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield "part", part.body


def _statements(body: list[ast.stmt], *, functions: bool) -> Iterator[ast.stmt]:
    """All statements of a block, nested ones too; those of inner functions if wanted."""
    for statement in body:
        yield statement
        for _, block in _branches(statement):
            yield from _statements(block, functions=functions)
        if functions and isinstance(statement, FunctionNode):
            yield from _statements(statement.body, functions=True)
