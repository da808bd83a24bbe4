"""Errors for missing compiled parts of the package."""

from __future__ import annotations

import os
from typing import Optional

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def advice(target: str) -> str:
    """Text that says how to obtain the result of a CMake target, depending on whether this is a build tree, a source tree or an installed package."""
    build = os.path.dirname(os.path.dirname(_FOLDER))
    if os.path.exists(os.path.join(build, "CMakeCache.txt")):
        return f"this is a build tree, and the target is not built: cmake --build {build} --target {target}"
    if os.path.exists(os.path.join(build, "CMakeLists.txt")):
        return (f"these are te-fl's sources: pip install {build}, or put a build tree's python folder on PYTHONPATH "
                "(cmake -S . -B build/release && cmake --build build/release; PYTHONPATH=build/release/python)")
    return "this te_fl was installed incompletely; install it again"


def native() -> Optional[str]:
    """The reason why the native module cannot be imported; None if it exists."""
    if os.path.exists(os.path.join(_FOLDER, "_native.abi3.so")):
        return None
    return f"te_fl's native module is not in {_FOLDER}: {advice('te_fl_python')}"
