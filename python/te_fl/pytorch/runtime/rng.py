"""Named random states, for layers that must draw equal or different numbers on the ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, List, Union

import torch

from te_fl import torch_device
from te_fl.errors import AlreadyExists, NotFound
from te_fl.pytorch.runtime.device import default_device

__all__ = ["CudaRNGStatesTracker", "get_all_rng_states", "graph_safe_rng_available", "is_graph_safe_rng_state", "set_all_rng_states"]

_all_states: Dict[str, Union[torch.Tensor, torch.Generator]] = {}


def get_all_rng_states() -> dict:
    """The states, by name, of the tracker that was changed last."""
    return _all_states


def set_all_rng_states(states: List) -> None:
    global _all_states
    _all_states = states


def graph_safe_rng_available() -> bool:
    """True if states are generators that CUDA graphs can register; on the CPU states are tensors."""
    return torch.cuda.is_available() and hasattr(torch.cuda.CUDAGraph, "register_generator_state") and \
        hasattr(torch.Generator, "graphsafe_set_state")


def is_graph_safe_rng_state(state: Union[torch.Tensor, torch.Generator]) -> bool:
    return graph_safe_rng_available() and isinstance(state, torch.Generator)


def _generator() -> torch.Generator:
    device = default_device()
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch_device.default_generator(device)


def _state_of(generator: torch.Generator) -> Union[torch.Tensor, torch.Generator]:
    return generator.graphsafe_get_state() if graph_safe_rng_available() else generator.get_state()


def _give_state(generator: torch.Generator, state: Union[torch.Tensor, torch.Generator]) -> None:
    if isinstance(state, torch.Generator):
        generator.graphsafe_set_state(state)
    else:
        generator.set_state(state)


class CudaRNGStatesTracker:
    """Random states by name, each with its own seed, for the generator of default_device().

    with tracker.fork(name): random numbers in the block come from that state. The next fork continues where the block ended.
    """

    def __init__(self):
        self.states_: dict = {}
        self.seeds_: set = set()

    def reset(self) -> None:
        """Removes all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> Dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: Dict[str, torch.Tensor]) -> None:
        self.states_ = states
        set_all_rng_states(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a state, initialised as by torch.manual_seed(seed). Neither the name nor the seed may have been used before."""
        if seed in self.seeds_:
            raise AlreadyExists(f"CudaRNGStatesTracker: seed {seed} was given before; states of one seed would draw the same numbers")
        if name in self.states_:
            raise AlreadyExists(f"CudaRNGStatesTracker: the state {name!r} is there already; reset() forgets all")
        generator = _generator()
        if graph_safe_rng_available():
            state = generator.clone_state()
            state.manual_seed(seed)
        else:
            state = torch.Generator(generator.device).manual_seed(seed).get_state()
        self.seeds_.add(seed)
        self.states_[name] = state
        set_all_rng_states(self.states_)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng"):
        """Inside of the block, random numbers come from the state `name`."""
        if name not in self.states_:
            raise NotFound(f"CudaRNGStatesTracker: there is no state {name!r}; there are {sorted(self.states_)}; add() makes one")
        generator = _generator()
        outside = _state_of(generator)
        _give_state(generator, self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state_of(generator)
            _give_state(generator, outside)
