"""Parameters of a group of experts: one for each expert, or one for all of them (single_grouped_weight, single_grouped_bias)."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

import torch


class EachExpert:
    """An init method for a parameter of all experts, which initialises the slice of each expert, so that methods that read the shape see one weight."""

    def __init__(self, init: Callable[[torch.Tensor], Any]) -> None:
        self.init = init

    def __call__(self, whole: torch.Tensor) -> None:
        for part in whole.unbind(0):
            self.init(part)


def expert_names(kind: str, experts: int, single: bool) -> Tuple[str, ...]:
    """The names of the parameters of this kind ("weight"): one name, or one for each expert."""
    return (kind,) if single else tuple(f"{kind}{i}" for i in range(experts))


def regroup(state_dict: Dict[str, Any], prefix: str, kind: str, experts: int, single: bool) -> None:
    """Converts the parameters of a checkpoint to the form of the module: one for each expert, or one for all. Other checkpoints are left as they are."""
    own, parts = prefix + kind, [f"{prefix}{kind}{i}" for i in range(experts)]
    if single and own not in state_dict and all(part in state_dict for part in parts):
        state_dict[own] = torch.stack([state_dict.pop(part) for part in parts])
    elif not single and own in state_dict and parts[0] not in state_dict:
        whole = state_dict.pop(own)
        state_dict.update(zip(parts, whole.unbind(0)))
