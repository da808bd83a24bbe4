"""A container of operations and modules."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple, Union

import torch

from te_fl.errors import InvalidArgument
from te_fl.pytorch.ops.operation import BasicOperation, FusibleOperation, Row


class Sequential(torch.nn.Module):
    """Runs modules in sequence. Consecutive operations form a row. Extra inputs of the call are distributed to the rows in order, and extra outputs
    follow the output. Other modules take one tensor and return one.
    """

    def __init__(self, *args: Union[FusibleOperation, torch.nn.Module]) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], dict):
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            self.extend(args)

    def _keys(self, idx: Union[int, slice]) -> List[str]:
        keys = list(self._modules)
        if isinstance(idx, slice):
            return keys[idx]
        if not -len(keys) <= idx < len(keys):
            raise IndexError(f"Sequential: index {idx} of {len(keys)} modules")
        return [keys[idx]]

    def _next_key(self) -> str:
        return str(max((int(key) + 1 for key in self._modules if key.isdecimal()), default=0))

    def __getitem__(self, idx: Union[int, slice]) -> torch.nn.Module:
        found = [self._modules[key] for key in self._keys(idx)]
        return Sequential(*found) if isinstance(idx, slice) else found[0]

    def __setitem__(self, idx: int, module: torch.nn.Module) -> None:
        self._modules[self._keys(idx)[0]] = module

    def __delitem__(self, idx: Union[int, slice]) -> None:
        for key in self._keys(idx):
            del self._modules[key]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules.values())

    def append(self, module: torch.nn.Module) -> "Sequential":
        self.add_module(self._next_key(), module)
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> "Sequential":
        for module in modules:
            self.append(module)
        return self

    def insert(self, idx: int, module: torch.nn.Module) -> "Sequential":
        keys = [*self._keys(slice(idx, None)), self._next_key()]
        moved = [module, *(self._modules[key] for key in keys[:-1])]
        self._modules.update(zip(keys, moved))
        return self

    def pop(self, idx: Union[int, slice]) -> torch.nn.Module:
        found = self[idx]
        del self[idx]
        return found

    def __iadd__(self, modules: Iterable[torch.nn.Module]) -> "Sequential":
        return self.extend(modules)

    def __add__(self, modules: Iterable[torch.nn.Module]) -> "Sequential":
        return Sequential(*self, *modules)

    def _rows(self) -> List[Any]:
        """The modules in order; consecutive fusible operations are a list."""
        groups: List[Any] = []
        for module in self._modules.values():
            if not isinstance(module, FusibleOperation):
                groups.append(module)
            elif groups and isinstance(groups[-1], list):
                groups[-1].append(module)
            else:
                groups.append([module])
        return [Row(group) if isinstance(group, list) else group for group in groups]

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor,
                op_kwargs: Optional[Dict[Union[torch.nn.Module, int], Dict[str, Any]]] = None) -> Union[torch.Tensor, Tuple[torch.Tensor, ...]]:
        """The output of the last module; with extra outputs a tuple (output, *extra outputs). op_kwargs: keyword arguments of basic operations'
        forwards, keyed by the operation or its index.
        """
        rows = self._rows()
        by_op = self._find_kwargs(rows, op_kwargs or {})
        taken = sum(row.num_extra_inputs for row in rows if isinstance(row, Row))
        if len(extra_inputs) != taken:
            raise InvalidArgument(f"Sequential: {len(extra_inputs)} extra inputs are given; its operations take {taken}")
        x, shown = input, []
        for row in rows:
            if not isinstance(row, Row):
                x = row(x)
                continue
            own, extra_inputs = extra_inputs[:row.num_extra_inputs], extra_inputs[row.num_extra_inputs:]
            found = row(x, *own, basic_op_kwargs=[by_op.pop(id(op), {}) for op in row.basic_ops])
            x, *extras = found if isinstance(found, tuple) else (found,)
            shown += extras
        return (x, *shown) if shown else x

    def _find_kwargs(self, rows: List[Any], op_kwargs: Mapping[Any, Dict[str, Any]]) -> Dict[int, Dict[str, Any]]:
        if not op_kwargs:
            return {}
        present = {id(op) for row in rows if isinstance(row, Row) for op in row.basic_ops}
        by_op = {}
        for key, kwargs in op_kwargs.items():
            module = self[key] if isinstance(key, int) else key
            if not isinstance(module, BasicOperation) or id(module) not in present:
                raise InvalidArgument(f"Sequential: op_kwargs names {type(module).__name__}; it names basic operations of the container")
            by_op[id(module)] = kwargs
        return by_op
