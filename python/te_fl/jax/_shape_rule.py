"""Reads the shape rules of the specification, whose grammar stands at te_fl_arg_desc in te_fl/plugin.h."""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Mapping

from te_fl import _native


@functools.cache
def _arguments(op: str) -> Dict[str, dict]:
    return {arg["name"]: arg for arg in _native.schema(op)["args"]}


def _holds(op: str, test: str, settings: Mapping[str, Any]) -> bool:
    name, _, value = test.partition(" is ")
    arg = _arguments(op)[name]
    setting = settings.get(name, arg["default"])
    if not value:
        return bool(setting)
    return setting == value or setting == arg["enum"].index(value)


def terms(op: str, rule: str, settings: Mapping[str, Any]) -> List[str]:
    """The terms of a rule in a call whose scalars are `settings`: of "trans_a ? K M : M K", K and M where trans_a is set."""
    while " ? " in rule:
        test, _, rest = rule.partition(" ? ")
        dims, _, rule = rest.partition(" : ")
        if _holds(op, test, settings):
            return dims.split()
    return rule.split()
