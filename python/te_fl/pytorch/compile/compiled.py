"""te-fl's layers in graphs of torch.compile: one custom op for the forward and one for the backward. This module is imported when a graph is first
traced.

An op gets the module's number and the layer's name, and looks both up at run time, as eager code does. So the autocast scopes, FP8 state and cached
weights at run time apply, and a change of them needs no new graph. The op modifies state outside of its arguments, so it is registered as an effect:
PyTorch keeps effects in order and never drops, repeats or merges them.

A graph may overwrite any tensor that it will not read again, so a layer copies the inputs that its backward needs.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.fx.traceback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._higher_order_ops import effects
from torch.utils.checkpoint import CheckpointPolicy

from te_fl import _native
from te_fl.errors import FailedPrecondition
from te_fl.pytorch.autograd.call import LayerCall, keeps_graph
from te_fl.pytorch.autograd.torch_checkpoint import Recomputed
from te_fl.pytorch.compile import exported
from te_fl.pytorch.fp8 import quantization
from te_fl.pytorch.modules.attention import sums_of_lengths
from te_fl.pytorch.runtime import export
from te_fl.pytorch.runtime import random as generator
from te_fl.pytorch.runtime import registry
from te_fl.pytorch.runtime.dtypes import BY_CODE, DTYPE_CODES
from te_fl.pytorch.runtime.refuse import refuse

_library = torch.library.Library("te_fl", "FRAGMENT")
# Ops change state on the host, which a replay of a CUDA graph recorded by inductor would skip. Before this tag existed, inductor recorded no graph
# that has tensors of the host, as all of these ops have.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def _run_once(fake: Callable) -> Callable:
    """Wraps a fake kernel. The wrapper marks the op for PyTorch's partitioner as not to be recomputed by torch.utils.checkpoint, since it is an
    effect.
    """
    def traced(*arguments):
        meta = torch.fx.traceback.get_current_meta()
        if "recompute" in meta:
            meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return fake(*arguments)

    return traced


def _register_effect(op: Any) -> None:
    register = getattr(torch.library, "_register_effectful_op", effects._register_effectful_op)  # of torch.library since PyTorch 2.10
    register(op, effects._EffectType.ORDERED)
    torch.fx.node.has_side_effect(op)


def define(schema: str, run: Callable, fake: Callable, effect: bool = True):
    """Defines an op in the namespace te_fl with this schema. run: the implementation; fake: the shape function on tensors without memory."""
    name = schema.partition("(")[0]
    fake = _run_once(fake) if effect else fake
    _library.define(schema, tags=_TAGS)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"te_fl::{name}", fake, lib=_library)
    op = getattr(torch.ops.te_fl, name)
    if effect:
        _register_effect(op.default)
    return op


# Inside of an FP8 scope that a graph begins and ends, each op takes an output of the previous op as an argument. PyTorch 2.11's inductor keeps
# effects, but reorders them unless arguments express the order. Non-empty only while Dynamo traces such a scope.
chain: List[torch.Tensor] = []

# Non-empty while Dynamo traces the function passed to te_fl.pytorch.checkpoint().
recomputing: List[bool] = []

# -- the layers


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _trained(parameter: torch.Tensor, wanted: bool) -> torch.Tensor:
    """The parameter with the requires_grad that it has in the program. Tensors inside of a running graph have none."""
    return parameter if parameter.requires_grad == wanted else parameter.detach().requires_grad_(wanted)


def _attention(names: List[str], others: List[torch.Tensor], lengths: List[int], extras: List[torch.Tensor]) -> Optional[dict]:
    found: dict = dict(zip(names, others))
    found.update((name, n) for name, n in zip(("max_seqlen_q", "max_seqlen_kv"), lengths) if n >= 0)
    if extras:
        found["bias"] = extras[0]
    return found


class _Rerun(NamedTuple):
    """A forward that the backward recomputes: te_fl.pytorch.checkpoint() in a graph. The graph keeps the parameters."""

    record: Any  # a record from _native.recompute_record()
    call: LayerCall
    tensors: Tuple[torch.Tensor, ...]  # inputs and extras

    def run(self, parameters: Sequence[torch.Tensor], second: bool):
        return Recomputed(self.record, second).within(_native.layer_forward, self.call, True, *self.tensors, *parameters)


_again: dict = {}  # by number
_again_numbers = itertools.count(1)


def _look_again(module: Any) -> None:
    """Forces Dynamo to check the parameters' requires_grad again before the next run; the op's `trained` and the graph's backward depend on it.
    Dynamo rechecks a dict's parameters only if the dict was written, which requires_grad_() does not do: a weight frozen when the graph was traced
    would never get a gradient.
    """
    for part in module.modules():
        _native.touch(part._parameters)


def _forward(number, kind, words, numbers, keeps, recomputes, trained, first, activation, width, inputs, extras, parameters,
             names, others, lengths, random, after):
    module = registry.find_module(number)
    layer, order = module._in_graph(inputs[0].device, kind, (*words, *numbers))
    quantization.notice(module)
    _look_again(module)
    order = range(len(parameters)) if order is None else order
    own = [parameters[i] for i in order]
    if keeps:
        inputs, extras, others = ([_own(t) for t in group] for group in (inputs, extras, others))
        random = None if random is None else _own(random)
        own = [_trained(parameters[i], trained[i]) for i in order]
    else:
        inputs = [t.contiguous() for t in inputs]
    microbatch = quantization.reused_weights() if first < 0 else bool(first)
    call = LayerCall(layer.native, len(inputs), len(extras), activation, microbatch, _attention(names, others, lengths, extras) or None, random, False)
    if not (keeps and recomputes):
        output, token = _native.layer_forward(call, keeps, *inputs, *extras, *own)
        if keeps and kind == "attention":
            output = _own(output)  # the backward reads the output
        token = torch.zeros(1, dtype=torch.int64, device="cpu") if token is None else token
        return output, token, torch.tensor([0, *order], dtype=torch.int64, device="cpu")
    again = _Rerun(_native.recompute_record(), call, (*inputs, *extras))
    output, _ = again.run(own, False)
    number = next(_again_numbers)
    _again[number] = again
    about = torch.tensor([number, *order], dtype=torch.int64, device="cpu")
    weakref.finalize(about, _again.pop, number, None)
    return output, torch.zeros(1, dtype=torch.int64, device="cpu"), about


def _forward_fake(number, kind, words, numbers, keeps, recomputes, trained, first, activation, width, inputs, extras, parameters,
                  names, others, lengths, random, after):
    if torch.compiler.is_exporting():
        raise refuse("torch.export", "mod", f"a model with a {kind} of te_fl.pytorch", "an exported program would name a module of this "
                     "process; export a model without te_fl's modules, or run this one by torch.compile")
    x = inputs[0]
    shape = x.shape if width < 0 else (*x.shape[:-1], width)
    if kind == "attention":
        shape = (*x.shape[:-1], inputs[2].shape[-1])
    output = torch.empty(shape, dtype=BY_CODE.get(activation, x.dtype), device=x.device)
    token, about = (torch.empty(n, dtype=torch.int64, device="cpu") for n in (1, 1 + len(parameters)))
    return output, token, about


# keeps: a backward may follow. trained: for each parameter, whether it needs a gradient. first: is_first_microbatch as 0 or 1; -1 for None.
_forward_op = define("layer_forward(Tensor module, str kind, str[] words, SymInt[] numbers, bool keeps, bool recomputes, "
                     "bool[] trained, int first, int activation, int width, Tensor[] inputs, Tensor[] extras, "
                     "Tensor[] parameters, str[] names, Tensor[] others, SymInt[] lengths, Tensor? random, Tensor? after) "
                     "-> (Tensor output, Tensor token, Tensor about)", _forward, _forward_fake)


def _backward(token, about, grad, parameters, needed, trained, sizes, ranks, dtypes):
    again, *order = about.tolist()
    native = [_trained(parameters[i], trained[i]) for i in order]
    if again:
        if again not in _again:
            raise FailedPrecondition("what this forward kept for its backward has gone: a hook for saved tensors replaced it by "
                                     "a copy; run the forward again")
        _, token = _again[again].run(native, True)
    gradients = _native.layer_backward(token, grad.resolve_neg().contiguous(), None, keeps_graph(), any(needed), *native)
    own = dict(zip(order, gradients[len(needed):]))
    result, at = [], 0
    for gradient, wanted, rank, dtype in zip(gradients, needed, ranks, dtypes):
        shape, at = sizes[at:at + rank], at + rank
        if wanted:
            result.append(gradient.to(BY_CODE[dtype]).view(shape))
    for i, (wanted, parameter) in enumerate(zip(trained, parameters)):
        if wanted:
            gradient = own.get(i)
            result.append(torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device) if gradient is None
                          else gradient.to(parameter.dtype))
    return result


def _backward_fake(token, about, grad, parameters, needed, trained, sizes, ranks, dtypes):
    result, at = [], 0
    for wanted, rank, dtype in zip(needed, ranks, dtypes):
        shape, at = sizes[at:at + rank], at + rank
        if wanted:
            result.append(torch.empty(shape, dtype=BY_CODE[dtype], device=grad.device))
    return result + [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p, wanted in zip(parameters, trained) if wanted]


# needed: the inputs that need a gradient. `sizes` has the concatenated extents of these inputs. The result has their gradients, then those of
# parameters.
_backward_op = define("layer_backward(Tensor token, Tensor about, Tensor grad, Tensor[] parameters, bool[] needed, "
                      "bool[] trained, SymInt[] sizes, int[] ranks, int[] dtypes) -> Tensor[]", _backward, _backward_fake, effect=False)
_ARGUMENTS = [argument.name for argument in _forward_op.default._schema.arguments]
_TRAINED, _INPUTS = _ARGUMENTS.index("trained"), _ARGUMENTS.index("inputs")
assert _ARGUMENTS[_INPUTS:_INPUTS + 3] == ["inputs", "extras", "parameters"]  # these are adjacent, so one slice selects the arguments with gradients


def _save(ctx, inputs, output) -> None:
    trained, group, extras, parameters = inputs[_TRAINED], *inputs[_INPUTS:_INPUTS + 3]
    _, token, about = output
    ctx.save_for_backward(token, about, *parameters)
    ctx.trained, followed = trained, (*group, *extras)
    ctx.counts = (len(group), len(extras))
    # PyTorch treats an empty list as a list of tensors, whose gradient is a list too.
    ctx.nothing = tuple([None] * len(v) if isinstance(v, list) and all(isinstance(t, torch.Tensor) for t in v) else None for v in inputs)
    ctx.needed = [t.requires_grad for t in followed]
    ctx.sizes = [n for t in followed for n in t.shape]
    ctx.ranks, ctx.dtypes = [t.dim() for t in followed], [DTYPE_CODES[t.dtype] for t in followed]


def _gradient(ctx, grad, *_):
    if grad is None:
        return ctx.nothing
    token, about, *parameters = ctx.saved_tensors
    found = iter(_backward_op(token, about, grad, parameters, ctx.needed, ctx.trained, ctx.sizes, ctx.ranks, ctx.dtypes))
    own = [next(found) if wanted else None for wanted in (*ctx.needed, *ctx.trained)]
    n, more = ctx.counts
    return (*ctx.nothing[:_INPUTS], own[:n], own[n:n + more], own[n + more:], *ctx.nothing[_INPUTS + 3:])


def _no_second_derivative(ctx, *grads):
    raise RuntimeError("te_fl.pytorch: a layer's backward has no derivative; second derivatives are not supported")


torch.library.register_autograd("te_fl::layer_forward", _gradient, setup_context=_save, lib=_library)
torch.library.register_autograd("te_fl::layer_backward", _no_second_derivative, lib=_library)


@torch.compiler.assume_constant_result
def _lacks_code(device: str) -> bool:
    """True if inductor compiles the current graph and has no code generator for this kind of device. Called while Dynamo traces."""
    tracing = InstructionTranslator.current_tx().output.compiler_fn
    if not isinstance(getattr(tracing, "_torchdynamo_orig_backend", tracing), torch._TorchCompileInductorWrapper):
        return False
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
    init_backend_registration()
    return get_scheduling_for_device(device) is None


def check_device(what: str, device: torch.device) -> None:
    """Refuses a device for which inductor has no code generator (inductor itself would fail an assertion). The error breaks the graph, and the call
    runs eagerly. Call it in the function that has checked is_compiling(), which Python then runs again outside of the graph.
    """
    if device.type not in ("cpu", "cuda") and _lacks_code(device.type):
        raise refuse(what, "backend", "inductor", f"PyTorch's inductor generates no code for {device.type}; leave fullgraph=True out, or give torch.compile "
                     "backend='aot_eager'")


def forward(module: Any, kind: str, key: Tuple[Any, ...], width: int, activation: int, first: Any, inputs: Sequence[torch.Tensor],
            extras: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], attention: Optional[dict], random: Optional[torch.Tensor]) -> torch.Tensor:
    """NativeLayer.compute() in a graph, where a layer is a name: each run of the graph finds the layer with module._in_graph(). Dynamo traces this
    function.

    key: words, then integers. width: the output's last extent; -1: the input's.
    """
    if export.state.exporting:
        return exported.forward(module, kind, key, activation, inputs, extras, parameters, attention, random)
    trained = [p.requires_grad for p in parameters]
    keeps = torch.is_grad_enabled() and (any(trained) or any([t.requires_grad for t in (*inputs, *extras)]))
    names, others, lengths = [], [], [-1, -1]
    for name, value in (attention or {}).items():
        if name == "max_seqlen_q" and value is not None:
            lengths[0] = value
        elif name == "max_seqlen_kv" and value is not None:
            lengths[1] = value
        elif value is not None and not (extras and name == "bias"):
            names.append(name)
            others.append(value)
    output, _, about = _forward_op(module._number, kind, [k for k in key if isinstance(k, str)],
                                   [int(k) for k in key if not isinstance(k, str)], keeps, bool(recomputing), trained,
                                   -1 if first is None else int(bool(first)), activation, width, list(inputs),
                                   list(extras), list(parameters), names, others, lengths, random, chain[-1] if chain else None)
    if chain:
        chain[-1] = about
    return output


def recomputed(function: Callable, args: tuple, kwargs: dict) -> Any:
    """te_fl.pytorch.checkpoint() in a graph. te-fl's layers save only their inputs. PyTorch chooses what else is saved."""
    recomputing.append(True)
    try:
        return function(*args, **kwargs)
    finally:
        recomputing.pop()


# -- ops for other parts of modules


def _draw(number, device):
    if torch._C._current_graph_task_id() >= 0:
        raise refuse("torch.utils.checkpoint", "function", "one that draws from a get_rng_state_tracker", "a backward would draw other numbers "
                     "than the forward did; use te_fl.pytorch.checkpoint()")
    with registry.find_module(number).get_rng_state_tracker().fork():
        return generator.draw(device)


_draw_op = define("draw(Tensor module, Device device) -> Tensor", _draw,
                  lambda number, device: torch.empty(2, dtype=torch.int64, device=device))


def draw(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    """random.draw_for() in a graph."""
    return _draw_op(number, device)


def _lengths(mask):
    return sums_of_lengths("DotProductAttention", mask)


_lengths_op = define("cumulative_lengths(Tensor mask) -> Tensor", _lengths,
                     lambda mask: torch.empty(mask.shape[0] + 1, dtype=torch.int32, device=mask.device), effect=False)


def cumulative_lengths(mask: torch.Tensor) -> torch.Tensor:
    """attention.cumulative_lengths() in a graph."""
    return exported.cumulative_lengths(mask) if export.state.exporting else _lengths_op(mask)
