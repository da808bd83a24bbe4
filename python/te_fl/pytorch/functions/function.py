"""Differentiable functions with one te-fl op for the forward and one for the backward.

Eager code uses torch.autograd.Function, which adds 3 us to the op, while a torch.library op adds 12 us. Under torch.compile the two functions are
custom ops of the namespace te_fl with fake kernels, so graphs contain them without a break.
"""

from __future__ import annotations

import inspect
from typing import Callable

import torch

from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.runtime import traced

_library = torch.library.Library("te_fl", "FRAGMENT")


class Op:
    """A function of tensors that calls te-fl. schema: the torch.library signature. fake: the shape function on tensors without memory."""

    def __init__(self, schema: str, run: Callable, fake: Callable):
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, run, "CompositeExplicitAutograd")
        _library.impl(name, fake, "Meta")  # register_fake() is equivalent, but reads its caller's source file, which takes 2 ms per import
        self.name, self.run, self.__signature__ = name, run, inspect.signature(run)
        self.compiled = getattr(torch.ops.te_fl, name)

    def __call__(self, *arguments):
        if not torch.compiler.is_compiling():
            return self.run(*arguments)
        _check_device(self.name, arguments)
        return self.compiled(*arguments)


def _check_device(name: str, arguments: tuple) -> None:
    """Refuses tensors on devices for which the compiler of the current graph has no code generator."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            traced.graph.check_device(f"te_fl.pytorch: {name}", argument.device)
            return


def differentiable(forward: Op, backward: Op, save: Callable, gradient: Callable) -> Callable:
    """Makes `forward` differentiable.

    save(ctx, inputs, output) stores what the backward needs. gradient(op, ctx, *grads) calls op, which is `backward`, and returns one gradient or
    None for each input.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            output = forward.run(*arguments)
            save(ctx, arguments, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx, *grads):
            return gradient(backward.run, ctx, *grads)

    Function.__name__ = Function.__qualname__ = forward.name
    torch.library.register_autograd(f"te_fl::{forward.name}", lambda ctx, *grads: gradient(backward.compiled, ctx, *grads),
                                    setup_context=save, lib=_library)

    def call(*arguments):
        if not torch.compiler.is_compiling():
            return Function.apply(*arguments)
        _check_device(forward.name, arguments)
        return forward.compiled(*arguments)

    call.__name__ = call.__qualname__ = forward.name
    return call
