"""Hands layers over to torch.compile where it traces them.

The room that knows torch.compile, te_fl.pytorch.compile, lies above those that ask for it, and enters itself here when te_fl.pytorch is
imported. What it needs of the compiler takes a second to import, so it imports that when a graph is first made.
"""

from __future__ import annotations

from typing import Any

graph: Any = None  # te_fl.pytorch.compile, whose functions stand in graphs for what the rooms below compute


def enter(room: Any) -> None:
    global graph
    graph = room
