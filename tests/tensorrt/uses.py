"""What a source file uses of TensorRT, looked up in the real bindings: names, and how functions are called.

The bindings are a compiled module, whose docstrings have the signatures. Types follow from them: of what
`builder.create_network()` returns, every attribute that the source uses must exist. A name for something of TensorRT
stands for the same kind of thing in a whole file. Runs in a worker.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_SIGNATURE = re.compile(r"^(?:\d+\. )?(\w+)\((.*)\) -> (.+)$", re.MULTILINE)
_UNSAID = {"get_plugin_registry": "IPluginRegistry"}
"""What a function returns whose docstring does not say it."""
_PROPERTY = re.compile(r"^\(.*\) -> (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Found:
    """What was used ("IBuilderConfig.set_flag"), and what the bindings do not have or do not take."""

    uses: frozenset[str]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class _Instance:
    cls: type


@dataclass(frozen=True)
class _Items:
    item: Any


@dataclass(frozen=True)
class _Method:
    cls: type
    name: str

    @property
    def __name__(self) -> str:
        return self.name


@dataclass
class _Reader:
    """Walks a file; `names` has what each variable stands for."""

    trt: Any
    names: dict[str, Any]
    uses: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def read(self, node: ast.AST) -> None:
        """A statement, or whatever holds statements."""
        if isinstance(node, ast.Assign):
            self._assign(node.targets, self.value(node.value))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign([node.target], self.value(node.value))
        elif isinstance(node, ast.For):
            self._assign([node.target], _item(self.value(node.iter)))
            self._all(node.body + node.orelse)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tensorrt" and alias.asname:
                    self.names[alias.asname] = self.trt.plugin if alias.name == "tensorrt.plugin" else self.trt
        elif isinstance(node, ast.expr):
            self.value(node)
        else:
            self._all(ast.iter_child_nodes(node))

    def value(self, node: ast.AST | None) -> Any:
        """What an expression stands for, None if it is nothing of TensorRT."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(self.value(node.value), node)
        if isinstance(node, ast.Call):
            function = self.value(node.func)
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                self.value(argument)
            return self._call(function, node)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
            for generator in node.generators:
                self._assign([generator.target], _item(self.value(generator.iter)))
                self._all(generator.ifs)
            return _Items(self.value(node.elt))
        if node is not None:
            self._all(ast.iter_child_nodes(node))
        return None

    def _all(self, nodes: Any) -> None:
        for node in nodes:
            self.read(node)

    def _assign(self, targets: list[ast.expr], value: Any) -> None:
        for target in targets:
            if isinstance(target, ast.Name) and value is not None:
                self.names[target.id] = value
            elif (
                isinstance(target, ast.Attribute) and target.attr == "__class__" and isinstance(target.value, ast.Name)
            ):
                self.names[target.value.id] = _Instance(value)
            elif isinstance(target, ast.Attribute):
                self.value(target)

    def _attribute(self, owner: Any, node: ast.Attribute) -> Any:
        if owner is None or isinstance(owner, _Method | _Items) or not self._is_foreign(owner):
            return None
        holder = owner.cls if isinstance(owner, _Instance) else owner
        use = f"{holder.__name__.split('.')[-1]}.{node.attr}"
        if not hasattr(holder, node.attr):
            self.problems.append(f"line {node.lineno}: there is no {use}")
            return None
        self.uses.add(use)
        member = inspect.getattr_static(holder, node.attr)
        if isinstance(owner, _Instance) and isinstance(member, property):
            returned = _PROPERTY.search(member.fget.__doc__ or "") if member.fget else None
            return self._instance(returned[1] if returned else "")
        if isinstance(owner, _Instance):
            return _Method(owner.cls, node.attr)
        found = getattr(holder, node.attr)
        return (
            found if isinstance(found, type) or callable(found) or inspect.ismodule(found) else _Instance(type(found))
        )

    def _is_foreign(self, owner: Any) -> bool:
        cls = owner.cls if isinstance(owner, _Instance) else owner
        name = cls.__name__ if inspect.ismodule(cls) else getattr(cls, "__module__", "")
        return str(name).split(".")[0].startswith("tensorrt")

    def _call(self, function: Any, node: ast.Call) -> Any:
        if function is None:
            return None
        cls = function if isinstance(function, type) else None
        if cls is not None and issubclass(cls, enum.Enum):
            return _Instance(cls)
        documented = cls.__init__ if cls is not None else None
        documented = getattr(function.cls, function.name) if isinstance(function, _Method) else documented or function
        signatures = list(_signatures(documented, bound=cls is not None or isinstance(function, _Method)))
        if signatures and not any(_takes(signature, node) for signature, _ in signatures):
            takes = " or ".join(str(signature) for signature, _ in signatures)
            self.problems.append(f"line {node.lineno}: {function.__name__} takes {takes}, not ({ast.unparse(node)})")
        if cls is not None:
            return _Instance(cls)
        return self._instance(_UNSAID.get(function.__name__) or signatures[0][1]) if signatures else None

    def _instance(self, name: str) -> Any:
        last = re.split(r"[.:]", name.strip())[-1]
        found = [getattr(self.trt, each, None) for each in (last, last.removeprefix("I"))]
        cls = next((each for each in found if isinstance(each, type) and self._is_foreign(each)), None)
        return _Instance(cls) if cls is not None else None


def _item(value: Any) -> Any:
    return value.item if isinstance(value, _Items) else None


def _signatures(function: Any, *, bound: bool) -> Iterator[tuple[inspect.Signature, str]]:
    """Every way to call a function, and what it returns."""
    if inspect.isfunction(function):
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1 if bound else 0 :]
        yield signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty), ""
        return
    for _, text, returned in _SIGNATURE.findall(function.__doc__ or ""):
        if text.startswith("*args"):
            continue
        parameters = []
        for part in _parts(text)[1 if bound else 0 :]:
            default = None if "=" in part.replace("->", "") else inspect.Parameter.empty
            name = part.split(":")[0].split("=")[0].strip()
            parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
        yield inspect.Signature(parameters), returned


def _parts(text: str) -> list[str]:
    """A parameter list in parts; commas in brackets do not separate."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[(<{") - (character in "])>}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in map(str.strip, parts) if part and part not in ("*", "/")]


def _takes(signature: inspect.Signature, node: ast.Call) -> bool:
    named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
    open_ended = any(isinstance(argument, ast.Starred) for argument in node.args) or len(named) < len(node.keywords)
    given = [None for argument in node.args if not isinstance(argument, ast.Starred)]
    try:
        (signature.bind_partial if open_ended else signature.bind)(*given, **named)
    except TypeError:
        return False
    return True


def uses_of(source: str, module: str = "tensorrt") -> Found:
    """What a file uses of TensorRT, or of TensorRT-RTX, which has no plugins; in a worker."""
    trt = importlib.import_module(module)
    names = {"trt": trt}
    if module == "tensorrt":
        names["trtp"] = importlib.import_module("tensorrt.plugin")
    tree = ast.parse(source)
    reader = _Reader(trt, names)
    reader.read(tree)
    # A parameter has the name of what is passed, which may be made further down: read again with all names known.
    again = _Reader(trt, reader.names)
    again.read(tree)
    return Found(frozenset(again.uses), tuple(dict.fromkeys(again.problems)))
