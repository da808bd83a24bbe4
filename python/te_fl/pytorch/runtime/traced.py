"""Access to te_fl.pytorch.compile for lower packages.

Layers in lower packages call te_fl.pytorch.compile while torch.compile traces them, but must not import it. te_fl.pytorch.compile registers itself
here when te_fl.pytorch is imported. Importing the compiler takes a second, so that happens when a graph is first traced.
"""

from __future__ import annotations

from typing import Any

graph: Any = None  # te_fl.pytorch.compile, which provides the graph versions of functions of lower packages


def enter(subpackage: Any) -> None:
    global graph
    graph = subpackage
