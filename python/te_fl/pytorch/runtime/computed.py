"""Attributes that Transformer Engine's forwards write, and that te-fl computes on access."""

from __future__ import annotations

from typing import Any, Callable


class Computed:
    """A decorator like property, with assignment. An assigned value is returned until the computed value changes, because Transformer Engine's next
    forward would then overwrite it. A value assigned before the module's constructor has run is overwritten by the constructor.
    """

    def __init__(self, compute: Callable[[Any], Any]):
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = "_written_" + name

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self
        now = self._compute(module)
        assigned = module.__dict__.get(self._key)
        if assigned is not None:
            if assigned[0] == now:
                return assigned[1]
            del module.__dict__[self._key]
        return now

    def __set__(self, module: Any, value: Any) -> None:
        if "_parameters" in module.__dict__:
            module.__dict__[self._key] = (self._compute(module), value)
