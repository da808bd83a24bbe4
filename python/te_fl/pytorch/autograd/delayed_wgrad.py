"""Weight gradients that backward_dw() computes after the backward, with Transformer Engine's names."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple

import torch

from te_fl import _native
from te_fl.errors import FailedPrecondition, InvalidArgument
from te_fl.pytorch.autograd.call import count_delayed, find_delayed_main_grads, is_weight
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.runtime.dtypes import LIKE


class DelaysWgrad:
    """A mixin for modules with delay_wgrad_compute=True. Their backward defers the weights' gradients (without FP8 also the biases') and keeps the
    operands.
    """

    delay_wgrad_compute = False
    wgrad_accumulation_and_reduce_hooks: List[Callable[[], Any]]

    def _delay_wgrad(self, delays: Any, ub_bulk_wgrad: Any, names: Sequence[str]) -> None:
        """Called at the end of the module's __init__. names: the attribute names of the weights and biases."""
        self.delay_wgrad_compute = bool(delays)
        self._delayed_names = tuple(names)
        if not self.delay_wgrad_compute:
            return
        if ub_bulk_wgrad:
            raise InvalidArgument(f"{type(self).__name__}: delay_wgrad_compute does not go with ub_bulk_wgrad")
        for name in names:
            getattr(self, name).skip_backward_post_hook = True  # tells frameworks that their post-backward hook would run before the gradient exists

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]) -> None:
        """Registers a function that is called at the end of each backward_dw()."""
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def need_backward_dw(self) -> bool:
        """True if backward passes defer gradients to backward_dw()."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Computes the gradients that the earliest pending backward deferred; call it once for each backward. Does nothing without
        delay_wgrad_compute.

        Gradients are added to the parameters' grad. With fuse_wgrad_accumulation, weight gradients are added to main_grad instead.
        """
        if not self.need_backward_dw():
            return
        for layer, parameters in self._delayed():
            if layer is None:
                raise FailedPrecondition(f"{type(self).__name__}: backward_dw(): no backward has left gradients of weights; it "
                                         "is called once after each backward")
            self._compute_delayed(layer, parameters)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def _delayed(self) -> List[Tuple[Any, Sequence[torch.Tensor]]]:
        """Returns (layer, parameters) for each layer whose backward pass defers gradients. A layer that has not been created yet is None."""
        return [(next((layer for (kind, _), layer in self._layers.items() if kind == self._kind), None), self._own())]

    def _compute_delayed(self, layer: Any, parameters: Sequence[torch.Tensor]) -> None:
        main_grads = find_delayed_main_grads(parameters) if self.fuse_wgrad_accumulation else None
        gradients = _native.layer_backward_dw(layer.native, parameters, main_grads, LIKE)
        if main_grads is not None:
            count_delayed(parameters)
        for p, grad in zip(parameters, gradients):
            if grad is None or not p.requires_grad:
                continue
            if p.grad is None:
                p.grad = grad
            else:
                with torch.no_grad():
                    p.grad += grad

    def _check_hooks(self) -> None:
        """Refuses PyTorch gradient hooks on the parameters: deferred gradients would bypass them."""
        for name in self._delayed_names:
            p = getattr(self, name)
            late = is_weight(p) or not quantization.enabled()
            if late and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)):
                raise FailedPrecondition(f"{type(self).__name__}: {name} has a hook for its gradient, which with "
                                         "delay_wgrad_compute backward_dw() computes outside of PyTorch's backward; use "
                                         "register_wgrad_accumulation_and_reduce_hooks()")
