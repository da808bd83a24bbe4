"""Parses the specification's shape rules; te_fl_arg_desc in te_fl/plugin.h defines the grammar."""

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
    """The terms of a shape rule, given the call's scalars: "trans_a ? K M : M K" gives K and M if trans_a is set."""
    while " ? " in rule:
        test, _, rest = rule.partition(" ? ")
        dims, _, rule = rest.partition(" : ")
        if _holds(op, test, settings):
            return dims.split()
    return rule.split()
