"""Differentiable functions with one te-fl op for the forward and one for the backward.

Eager code uses torch.autograd.Function, which adds 3 us to the op, while a torch.library op adds 12 us. Under torch.compile the two functions are
custom ops of the namespace te_fl with fake kernels, so graphs contain them without a break.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from te_fl import _native, specification
from te_fl.pytorch.autograd.once import once_differentiable
from te_fl.pytorch.runtime import traced
from te_fl.pytorch.runtime.dtypes import BY_CODE, DTYPE_CODES

_library = torch.library.Library("te_fl", "FRAGMENT")


class Op:
    """A function of tensors that calls te-fl. schema: the torch.library signature. fake: the shape function on tensors without memory."""

    def __init__(self, schema: str, run: Callable, fake: Callable):
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, run, "CompositeExplicitAutograd")
        _library.impl(name, fake, "Meta")  # register_fake() is equivalent, but reads its caller's source file, which takes 2 ms per import
        self.name, self.run = name, run
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


_TENSOR = 0
_WORDS = {_TENSOR: "Tensor", 2: "bool", 3: "int", 4: "int", 5: "float", 6: "float", 7: "str", 9: "int[]"}  # types of arguments in torch.library


def _arguments(op: str, inputs: Optional[int], requests: Sequence[str]) -> Tuple[List[dict], List[dict]]:
    """Returns (the first `inputs` inputs of an op, None for all; its required outputs and those of `requests`), as entries of te_fl.schema()."""
    arguments = _native.schema(op)["args"]
    return ([a for a in arguments if a["role"] == 0][:inputs],
            [a for a in arguments if a["allocated"] and (not a["optional"] or a["name"] in requests)])


def op(name: str, library_name: str, inputs: Optional[int] = None, requests: Sequence[str] = ()) -> Op:
    """An op of te-fl as a function of its inputs, in the order of the specification, that returns its outputs in new tensors.

    library_name: the function's name in torch.ops.te_fl. inputs: the number of inputs that the function takes; None: all. requests: the optional
    outputs that it returns. Non-contiguous inputs are copied first.
    """
    taken, made = _arguments(name, inputs, requests)
    schema = ", ".join(f"{_WORDS[a['type']]}{'?' if a['type'] == _TENSOR and a['optional'] else ''} {a['name']}" for a in taken)
    results = ", ".join("Tensor" for _ in made)

    def fake(*values: Any) -> Any:
        arguments = dict(zip((a["name"] for a in taken), values))
        tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        dtypes = {key: DTYPE_CODES[tensor.dtype] for key, tensor in tensors.items()}
        forms = (specification.output(name, a["name"], shapes, dtypes, arguments) for a in made)
        like = next(iter(tensors.values()))
        outputs = tuple(like.new_empty(shape, dtype=BY_CODE[dtype]) for shape, dtype in forms)
        return outputs if len(outputs) > 1 else outputs[0]

    run = _native.positional_op(name)
    return Op(f"{library_name}({schema}) -> {results if len(made) == 1 else f'({results})'}",
              functools.partial(run, **dict.fromkeys(requests, True)) if requests else run, fake)


def _picker(places: Sequence[int]) -> Callable[[tuple], tuple]:
    """Returns a function that takes the elements at these places, one or more, out of a tuple."""
    first = places[0]
    return operator.itemgetter(*places) if len(places) > 1 else lambda values: (values[first],)


def differentiable_op(name: str, library_name: str, backward_name: str, inputs: Optional[int] = None, requests: Sequence[str] = ()) -> Callable:
    """op(), differentiable by the op's `gradient` in the specification. backward_name: the backward op's name in torch.ops.te_fl."""
    rule = specification.gradient(name)
    taken, made = _arguments(name, inputs, requests)
    numbers = [a["name"] for a in taken if a["type"] != _TENSOR]
    tensors = len(taken) - len(numbers)
    assert all(a["type"] == _TENSOR for a in taken[:tensors]), f"{name}: a tensor follows a number"
    # The backward op's arguments by name: gradients of the outputs, tensors of the forward, numbers. Others are None.
    of_outputs = {ours: theirs for theirs, ours in rule.grads.items()}
    forward_names = [a["name"] for a in (*taken, *made)]
    kept = {theirs: forward_names.index(ours) for theirs, ours in rule.saved.items() if ours in forward_names}
    known = [*(of_outputs.get(a["name"]) for a in made), *kept, *numbers]
    flows = [i for i, a in enumerate(made) if a["name"] in of_outputs]  # the outputs that have gradients
    requested = [theirs for theirs, ours in rule.results.items() if ours in forward_names]
    read, written = _arguments(rule.op, None, requested)
    results = [rule.results.get(a["name"]) for a in written]
    keep = _picker(list(kept.values()))
    reads = _picker([known.index(a["name"]) if a["name"] in known else len(known) for a in read])
    gives = _picker([results.index(a["name"]) if a["name"] in results else len(results) for a in taken])

    def save(ctx: Any, inputs: tuple, output: Any) -> None:
        outputs = output if len(made) > 1 else (output,)
        ctx.save_for_backward(*keep((*inputs, *outputs)))
        ctx.numbers = inputs[tensors:]
        if len(flows) < len(made):
            ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in flows))
            ctx.set_materialize_grads(len(flows) > 1)

    def gradient(backward: Callable, ctx: Any, *grads: Optional[torch.Tensor]) -> tuple:
        if grads[flows[0]] is None and len(flows) == 1:
            return (None,) * len(taken)
        found = backward(*reads((*grads, *ctx.saved_tensors, *ctx.numbers, None)))
        return gives((*found, None) if len(results) > 1 else (found, None))

    return differentiable(op(name, library_name, inputs, requests),
                          op(rule.op, backward_name, None, [a["name"] for a in written if a["optional"]]), save, gradient)


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
    call.forward, call.backward = forward, backward
    return call
