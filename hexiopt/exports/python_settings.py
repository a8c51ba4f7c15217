"""The settings that a Python function gives a configuration, by nested attributes and calls of constructors.

Nothing is run: statements are followed in order. What cannot be followed (a computed value, an assignment under a
condition, a call that changes the configuration) becomes `Computed`, so that its reader refuses or names it.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hexiopt.errors import InputError

_CONSTRUCTOR = "Config"


@dataclass(frozen=True)
class Computed:
    """A value that stands in the file as an expression."""

    text: str

    def __repr__(self) -> str:
        return self.text if len(self.text) <= 60 else self.text[:57] + "..."


@dataclass
class _Configuration:
    values: dict[str, Any] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)

    def copy(self) -> "_Configuration":
        return _Configuration(dict(self.values), list(self.bases))

    def set(self, name: str, values: dict[str, Any]) -> None:
        """Replace all values under `name` by `values`, whose names are relative to it."""
        for key in [key for key in self.values if key == name or key.startswith(f"{name}.")]:
            del self.values[key]
        self.values |= {f"{name}.{key}" if key else name: value for key, value in values.items()}


def python_settings(text: str, where: str) -> tuple[dict[str, Any], list[str]]:
    """The settings of the one configuration that a module makes, by dotted names, and the functions outside the file
    whose configurations it changes. Raises InputError for no Python, and for several configurations."""
    try:
        module = _Module(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(f"{where}: is neither a Python configuration nor TOML; give one of them") from None
    try:
        configurations = {
            name: configuration for name in module.functions if (configuration := module.of_function(name)) is not None
        }
    except RecursionError:
        raise InputError(f"{where}: has expressions nested too deeply; write their values") from None
    outer = [name for name in configurations if name not in module.called_functions] or list(configurations)
    if len(outer) > 1:
        raise InputError(f"{where}: makes {len(outer)} configurations, {', '.join(outer)}; leave the one that runs")
    configuration = configurations[outer[0]] if outer else module.at_top
    return configuration.values, configuration.bases


def is_python(text: str) -> bool:
    """Whether a text is a Python module."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


class _Module:
    def __init__(self, tree: ast.Module) -> None:
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.called_functions: set[str] = set()
        self._constants: dict[str, Any] = {}
        self._open: set[str] = set()
        at_top = _Scope(self, {})
        for statement in tree.body:
            if not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
                at_top.follow(statement)
        self._constants = at_top.constants
        self.at_top = next(iter(at_top.configurations.values()), _Configuration())

    def of_function(self, name: str) -> _Configuration | None:
        """The configuration that a function returns; None if it returns something else."""
        if name in self._open:
            return None
        self._open.add(name)
        scope = _Scope(self, dict(self._constants))
        for statement in self.functions[name].body:
            scope.follow(statement)
        self._open.discard(name)
        return scope.returned


class _Scope:
    def __init__(self, module: _Module, constants: dict[str, Any]) -> None:
        self._module = module
        self.constants = constants
        self.configurations: dict[str, _Configuration] = {}
        self._aliases: dict[str, tuple[str, ...]] = {}
        self.returned: _Configuration | None = None

    def follow(self, node: ast.stmt) -> None:
        """Follow one statement."""
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, value)
            case ast.Return(value=ast.Name(id=name)) if name in self.configurations:
                self.returned = self.configurations[name]
            case ast.Return(value=ast.Call() as call):
                self.returned = self._configuration_of(call)
            case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Assert():
                pass
            case _:
                self._set_aside(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        path = self._path(target)
        if path is None:
            return
        root, *names = path
        if names:
            configuration = self.configurations.setdefault(root, _Configuration())
            configuration.set(".".join(names), dict(self._values(value)))
        elif isinstance(value, ast.Attribute) and (aliased := self._path(value)) is not None:
            self._aliases[root] = aliased
        elif isinstance(value, ast.Call):
            if (result := self._configuration_of(value)) is not None:
                self.configurations[root] = result
        else:
            self.constants[root] = dict(self._values(value)).get("")

    def _path(self, node: ast.expr) -> tuple[str, ...] | None:
        """The root and the attributes of `root.a.b`, with an alias replaced by the attributes that it stands for."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return (*self._aliases.get(node.id, (node.id,)), *names)

    def _configuration_of(self, call: ast.Call) -> _Configuration | None:
        """The configuration that a call makes: of a constructor, a function of the file, or one from elsewhere."""
        name = ast.unparse(call.func)
        if name in self._module.functions:
            self._module.called_functions.add(name)
            configuration = self._module.of_function(name)
            return None if configuration is None else configuration.copy()
        if name.endswith(_CONSTRUCTOR):
            return _Configuration({key: value for key, value in self._values(call) if key})
        return _Configuration(bases=[name])

    def _values(self, node: ast.expr) -> Iterator[tuple[str, Any]]:
        """The values that an expression states, by names relative to it; of a call, its function's name under ''."""
        match node:
            case ast.Call(func=function, args=args, keywords=keywords):
                name = ast.unparse(function).removesuffix(f".{_CONSTRUCTOR}").rpartition(".")[2]
                if not name.endswith(_CONSTRUCTOR):  # of a table, whose fields say all
                    yield "", name
                parts = [
                    *((str(k), part) for k, part in enumerate(args)),
                    *((k.arg or "**", k.value) for k in keywords),
                ]
                for key, part in parts:
                    for inner, value in self._values(part):
                        yield f"{key}.{inner}" if inner else key, value
            case ast.List(elts=elements) if any(isinstance(element, ast.Call) for element in elements):
                tables = [dict(self._values(element)) for element in elements]
                yield "", [values.pop("", None) for values in tables]
                for k, values in enumerate(tables):
                    yield from ((f"{k}.{key}", value) for key, value in values.items())
            case ast.Name(id=name) if name in self.constants:
                yield "", self.constants[name]
            case _:
                try:
                    yield "", ast.literal_eval(node)
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    yield "", Computed(ast.unparse(node))

    def _set_aside(self, node: ast.stmt) -> None:
        """Record a statement that cannot be followed: its targets become `Computed`, a call stands under its text."""
        configuration = next(iter(self.configurations.values()), None)
        for inner in ast.walk(node):
            targets = inner.targets if isinstance(inner, ast.Assign) else []
            targets = [inner.target] if isinstance(inner, ast.AugAssign | ast.AnnAssign) else targets
            for path in filter(None, map(self._path, targets)):
                if len(path) > 1:
                    under = ast.unparse(node).splitlines()[0]
                    owner = self.configurations.setdefault(path[0], _Configuration())
                    owner.set(".".join(path[1:]), {"": Computed(under)})
                elif path[0] in self.constants:
                    self.constants[path[0]] = Computed(path[0])
        if isinstance(node, ast.Expr) and configuration is not None:
            configuration.values[ast.unparse(node)] = Computed("a call")
