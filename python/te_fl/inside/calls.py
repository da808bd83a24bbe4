"""The ways in which a version of the package calls its extension module, read from its sources without running them.

For a version that te-fl was not made for: what it calls otherwise than te-fl's functions take it is refused by name, since an argument by place
could be taken for another.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
from typing import Any, Dict, FrozenSet, Iterator, NamedTuple, Set, Tuple

_EXTENSION = "transformer_engine_torch"
_NOWHERE = {"LayerNorm"}  # onnx_extensions names it, and NVIDIA's extension does not have it either
Form = Tuple[int, FrozenSet[str]]  # the number of arguments by place, the names of the others


class Uses(NamedTuple):
    calls: Dict[str, Set[Form]]  # of functions; a call that spreads a list or mapping over its arguments has no form, and is left out
    names: Set[str]  # all that is read of the module


def _imported(tree: ast.AST) -> Tuple[Set[str], Dict[str, str]]:
    """({the module's names in a file}, {a name in the file: what it is in the module})."""
    modules, members = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == _EXTENSION}
        elif isinstance(node, ast.ImportFrom) and node.module == _EXTENSION:
            members.update({alias.asname or alias.name: alias.name for alias in node.names if alias.name != "*"})
    return modules, members


def _name(node: Any, modules: Set[str], members: Dict[str, str]) -> str:
    """The module's name of what an expression is, or nothing."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
        return node.attr
    return members.get(node.id, "") if isinstance(node, ast.Name) else ""


def _uses_of(source: str) -> Iterator[Tuple[str, Any]]:
    """(name, the call or None) of each use in a file."""
    tree = ast.parse(source)
    modules, members = _imported(tree)
    yield from ((name, None) for name in members.values())
    for node in ast.walk(tree):
        found = _name(node, modules, members)
        if found:
            yield found, None
        if isinstance(node, ast.Call) and (found := _name(node.func, modules, members)):
            yield found, node


def of_package(folder: pathlib.Path) -> Uses:
    """folder: the package transformer_engine's own. Its files for other frameworks are left out."""
    uses = Uses({}, set())
    for path in sorted((folder / "pytorch").rglob("*.py")):
        source = path.read_text()
        if _EXTENSION not in source:
            continue
        for name, call in _uses_of(source):
            uses.names.add(name)
            if call is not None and not any(isinstance(a, ast.Starred) for a in call.args) and all(k.arg for k in call.keywords):
                uses.calls.setdefault(name, set()).add((len(call.args), frozenset(k.arg for k in call.keywords)))
    return uses


def takes(function: Any, form: Form) -> bool:
    """True if the function can be called so."""
    count, keywords = form
    try:
        inspect.signature(function).bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def unknown(uses: Uses, members: Dict[str, Any]) -> Dict[str, str]:
    """{name: why} of what the package uses and the module's members do not have, or do not take as it is called."""
    found = {name: "te-fl has no such name" for name in uses.names - set(members) - _NOWHERE}
    for name, forms in uses.calls.items():
        function = members.get(name)
        if inspect.isfunction(function) and not all(takes(function, form) for form in forms):
            found[name] = "it is called with other arguments than te-fl's takes"
    return found
