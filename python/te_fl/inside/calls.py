"""Finds the calls that a version of transformer_engine makes to its extension module, by parsing its sources.

Used for versions that te-fl does not know. A function that the package calls with arguments that te-fl's function does not accept is refused by name,
since a positional argument could otherwise be mistaken for another.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
from typing import Any, Dict, FrozenSet, Iterator, NamedTuple, Set, Tuple

_EXTENSION = "transformer_engine_torch"
_NOWHERE = {"LayerNorm"}  # the package's onnx_extensions refers to this name, but NVIDIA's extension does not define it
Form = Tuple[int, FrozenSet[str]]  # the number of positional arguments, the names of keyword arguments


class Uses(NamedTuple):
    calls: Dict[str, Set[Form]]  # calls by function; calls with * or ** are left out
    names: Set[str]  # all attributes of the module that are read


def _imported(tree: ast.AST) -> Tuple[Set[str], Dict[str, str]]:
    """Returns ({names of the module in a file}, {a name in the file: the module's attribute})."""
    modules, members = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == _EXTENSION}
        elif isinstance(node, ast.ImportFrom) and node.module == _EXTENSION:
            members.update({alias.asname or alias.name: alias.name for alias in node.names if alias.name != "*"})
    return modules, members


def _name(node: Any, modules: Set[str], members: Dict[str, str]) -> str:
    """The module's attribute that an expression refers to, or ""."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
        return node.attr
    return members.get(node.id, "") if isinstance(node, ast.Name) else ""


def _find_uses(source: str) -> Iterator[Tuple[str, Any]]:
    """Yields (attribute name, call node or None) for each use of an attribute of transformer_engine_torch in a source file."""
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
    """Returns the uses in the package's files for PyTorch. folder: the folder of the package transformer_engine."""
    uses = Uses({}, set())
    for path in sorted((folder / "pytorch").rglob("*.py")):
        source = path.read_text()
        if _EXTENSION not in source:
            continue
        for name, call in _find_uses(source):
            uses.names.add(name)
            if call is not None and not any(isinstance(a, ast.Starred) for a in call.args) and all(k.arg for k in call.keywords):
                uses.calls.setdefault(name, set()).add((len(call.args), frozenset(k.arg for k in call.keywords)))
    return uses


def takes(function: Any, form: Form) -> bool:
    """True if the function accepts a call of this form."""
    count, keywords = form
    try:
        inspect.signature(function).bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def unknown(uses: Uses, members: Dict[str, Any]) -> Dict[str, str]:
    """{name: reason} for the names that the package uses and `members` lacks, or does not accept in the form of the call."""
    found = {name: "te-fl has no such name" for name in uses.names - set(members) - _NOWHERE}
    for name, forms in uses.calls.items():
        function = members.get(name)
        if inspect.isfunction(function) and not all(takes(function, form) for form in forms):
            found[name] = "it is called with other arguments than te-fl's takes"
    return found
