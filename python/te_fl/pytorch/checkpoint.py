"""Activation recomputation."""

from __future__ import annotations

from typing import Any, Callable

import torch


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError
