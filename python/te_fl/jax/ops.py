"""te-fl's ops as functions: y = te_fl.jax.ops.gelu(input=x). Arguments are keywords, as in docs/ops.md.

Outputs are returned in the specification's order; a single output is returned by itself. Their shapes follow from the inputs. If a shape does not
follow, and for an optional output, pass jax.ShapeDtypeStruct under the output's name. For an optional output, True requests it with the derived
shape, a dtype requests that dtype, and a QuantizedOutput a quantised output. An argument that is updated in place is passed as an array and returned.
Lists of arrays are passed as lists, and returned as lists if they are written. These ops have no gradients; te_fl.jax.dense and similar functions do.
Random numbers: rng=uint32[4], see te_fl.jax.quantize.random_state.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Mapping, Tuple

import jax
import jax.numpy as jnp
import numpy as np

from te_fl import _native, errors, specification
from te_fl.errors import InvalidArgument
from te_fl.jax._call import call
from te_fl.jax._op import CODES, DTYPES
from te_fl.jax._partition import Spread
from te_fl.jax._tensors import Quantized, QuantizedOutput

_TENSOR, _LIST, _SAVED, _COMMUNICATOR = 0, 1, 8, 10
_IN, _OUT, _INOUT = 0, 1, 2


@functools.cache
def _schema(op: str) -> dict:
    found = _native.schema(op)
    found["by_name"] = {arg["name"]: arg for arg in found["args"]}
    found["elementwise"] = all(arg["shape"] == "..." for arg in found["args"] if arg["type"] in (_TENSOR, _LIST))
    return found


def _output(op: str, arg: dict, operand: Any, known: tuple) -> Any:
    """The ShapeDtypeStruct or QuantizedOutput of an output; None: the output is not requested. known: the call, as specification.output() takes it."""
    if operand is None or operand is False:
        if arg["optional"] or operand is False:
            return None
        operand = True
    if isinstance(operand, jax.ShapeDtypeStruct):
        return operand
    shape, code = specification.output(op, arg["name"], *known)
    if isinstance(operand, QuantizedOutput):
        if operand.shape is None and shape is None:
            raise InvalidArgument(f"{op}: the shape of '{arg['name']}' does not follow from the inputs: give QuantizedOutput(shape=..)")
        return operand if operand.shape is not None else operand.of_shape(shape)
    dtype = jnp.dtype(operand) if operand is not True else None if code is None else DTYPES[code]
    if shape is None or dtype is None:
        raise InvalidArgument(f"{op}: the {'shape' if shape is None else 'dtype'} of '{arg['name']}' does not follow from the inputs: "
                         f"give {arg['name']}=jax.ShapeDtypeStruct(shape, dtype)")
    return jax.ShapeDtypeStruct(shape, dtype)


def _check_dtype(op: str, arg: dict, name: str, array: Any) -> None:
    """Raises te_fl.errors.InvalidArgument, during tracing, if the specification does not allow the array's dtype."""
    allowed = [t for i, t in enumerate(DTYPES) if arg["dtypes"] >> i & 1]
    if array.dtype not in allowed:
        raise InvalidArgument(f"{op}: argument '{name}' is {array.dtype}{list(array.shape)}, its dtype must be "
                                     f"{' or '.join(jnp.dtype(t).name for t in allowed)}; convert it first, as by {name}.astype(..)")


def _names(op: str, schema: dict) -> str:
    return f"{op}() takes {', '.join(schema['by_name'])}" + (", rng" if "rng" not in schema["by_name"] else "")


class _Call:
    """The arrays of one call, in the order of the call's text."""

    def __init__(self, op: str):
        self.op, self.operands, self.results, self.settings = op, [], [], {}

    def read(self, arg: dict, name: str, value: Any, written: bool) -> None:
        if isinstance(value, Quantized):
            for part, array in value.parts():
                self.operands.append((name + part, array))
            self.settings[f"{name}.scaling"] = value.scaling
            return
        array = jnp.asarray(value)
        _check_dtype(self.op, arg, name, array)
        self.operands.append((name, array))
        if written:
            self.results.append((name, jax.ShapeDtypeStruct(array.shape, array.dtype)))

    def write(self, name: str, wanted: Any) -> None:
        if not isinstance(wanted, QuantizedOutput):
            self.results.append((name, wanted))
            return
        self.operands += [(name + part, array) for part, array in wanted.operands()]
        self.results += [(name + part, struct) for part, struct in wanted.results()]
        self.settings.update({f"{name}.{key}": value for key, value in wanted.settings().items()})

    def run(self, elementwise: bool, spread: Spread, prepare: Mapping[str, Callable]) -> Dict[str, jax.Array]:
        return call(self.op, self.operands, self.results, self.settings, elementwise, spread, prepare)


def _given(op: str, schema: dict, arguments: Dict[str, Any]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Splits the arguments into scalars and tensors. TypeError for unknown names, and for arguments that JAX cannot pass."""
    scalars, tensors = {}, {}
    for name, value in arguments.items():
        arg = schema["by_name"].get(name)
        if arg is None and name != "rng":
            raise TypeError(f"{op}() has no argument '{name}'; {_names(op, schema)}")
        kind = _TENSOR if arg is None else arg["type"]
        if kind in (_SAVED, _COMMUNICATOR):
            raise TypeError(f"{op}: '{name}' cannot be given in JAX: it is a record of one process, not data")
        (tensors if kind in (_TENSOR, _LIST) else scalars)[name] = value
    return scalars, tensors


def _list(op: str, schema: dict, arg: dict, made: _Call, tensors: Dict[str, Any]) -> Dict[str, List[Tuple[str, Any]]]:
    """Adds a list of tensors to the call. Returns the written elements by the list's name, each as (name, kind); an empty dict if none is written."""
    operand, name = tensors.get(arg["name"]), arg["name"]
    if operand is None and arg["role"] == _OUT and not arg["optional"]:
        operand = True
    first = next(a["name"] for a in schema["args"] if a["type"] == _LIST)
    alike = list(tensors.get(first) or ()) if first != name else []  # the other lists have one element of the same shape for each of these
    if operand is True or isinstance(operand, QuantizedOutput) or arg["role"] == _OUT and isinstance(operand, (type, np.dtype)):
        operand = [operand] * len(alike)
    if operand is None or operand is False or isinstance(operand, (list, tuple)) and not operand:
        if not arg["optional"]:
            raise TypeError(f"{op}() needs '{name}', a list of one array or more; {_names(op, schema)}")
        return {}
    if not isinstance(operand, (list, tuple)):
        raise TypeError(f"{op}: '{name}' is a list of arrays, not {type(operand).__name__}")
    written = []
    for i, one in enumerate(operand):
        element, kind = f"{name}[{i}]", one
        if arg["role"] != _OUT or isinstance(one, (jax.Array, np.ndarray)):
            made.read(arg, element, one, arg["role"] != _IN)
        else:
            if arg["inout_if"] and tensors.get(arg["inout_if"]) is not None:
                raise InvalidArgument(f"{op}: what '{name}' holds stays where {arg['inout_if']} says so: give arrays, which are read and returned")
            shaped = getattr(one, "shape", None) is not None
            if not shaped and i >= len(alike):
                raise InvalidArgument(f"{op}: the shape of '{element}' does not follow from the inputs: give jax.ShapeDtypeStruct(shape, dtype) or "
                                 "QuantizedOutput(shape=..)")
            if isinstance(one, QuantizedOutput):
                kind = one if shaped else one.of_shape(alike[i].shape)
            elif not isinstance(one, jax.ShapeDtypeStruct):
                kind = jax.ShapeDtypeStruct(alike[i].shape, alike[i].dtype if one is True else jnp.dtype(one))
            made.write(element, kind)
        written.append((element, kind))
    return {name: written} if arg["role"] != _IN else {}


def _run(op: str, **arguments: Any) -> Any:
    return run(op, {}, **arguments)


def run(op: str, spread: Spread, prepare: Mapping[str, Callable] = {}, **arguments: Any) -> Any:
    """Runs an op by name. spread, prepare: see te_fl.jax._call.call."""
    schema = _schema(op)
    scalars, tensors = _given(op, schema, arguments)
    made = _Call(op)
    shapes: Dict[str, tuple] = {}
    dtypes: Dict[str, int] = {}
    counts: Dict[str, int] = {}
    outputs: List[str] = []
    wanted: Dict[str, Any] = {}
    lists: Dict[str, List[Tuple[str, Any]]] = {}
    for arg in schema["args"]:
        value = tensors.get(arg["name"])
        if arg["type"] == _LIST:
            lists.update(_list(op, schema, arg, made, tensors))
            if arg["role"] == _IN:
                counts[arg["name"]] = len(value or ())
        elif arg["type"] == _TENSOR and (arg["role"] == _IN or isinstance(value, (jax.Array, np.ndarray, Quantized))):
            if value is None:
                if not arg["optional"]:
                    raise TypeError(f"{op}() needs '{arg['name']}'; {_names(op, schema)}")
                continue
            made.read(arg, arg["name"], value, arg["role"] != _IN)
            array = value if isinstance(value, Quantized) else made.operands[-1][1]
            shapes[arg["name"]], dtypes[arg["name"]] = array.shape, CODES[jnp.dtype(array.dtype)]
            outputs += [arg["name"]] if arg["role"] != _IN else []
    for arg in schema["args"]:
        if arg["type"] == _TENSOR and arg["role"] != _IN and arg["name"] not in outputs:
            wanted[arg["name"]] = _output(op, arg, tensors.get(arg["name"]), (shapes, dtypes, scalars, counts))
            if wanted[arg["name"]] is not None:
                made.write(arg["name"], wanted[arg["name"]])
                outputs.append(arg["name"])
    if "rng" in tensors:
        made.operands.append(("rng", tensors["rng"]))
    made.settings.update({name: value for name, value in scalars.items()})
    values = made.run(schema["elementwise"] and not any(isinstance(v, (Quantized, QuantizedOutput)) for v in tensors.values()), spread, prepare)
    order = [arg["name"] for arg in schema["args"]]
    def value_of(name: str, struct: Any) -> Any:
        return struct.value(name, values) if isinstance(struct, QuantizedOutput) else values[name]

    found = [[value_of(*one) for one in lists[name]] if name in lists else value_of(name, wanted.get(name))
             for name in sorted([*outputs, *lists], key=order.index)]
    return found[0] if len(found) == 1 else tuple(found)


def backward(op: str, spread: Spread, kept: Mapping[str, Any], grads: Mapping[str, jax.Array], **scalars: Any) -> Dict[str, jax.Array]:
    """Runs the backward op that the specification names for `op`. Returns the gradients of the op's inputs, by name.

    spread: that of the forward op. kept: arrays of the forward that the backward op reads, and the inputs that are to have a gradient, by name; None
    for an array that the call did not have. grads: the gradients of outputs, by name.
    """
    rule = specification.gradient(op)
    arguments: Dict[str, Any] = {theirs: grads[ours] for theirs, ours in rule.grads.items() if ours in grads}
    arguments.update((theirs, kept[ours]) for theirs, ours in rule.saved.items() if kept.get(ours) is not None)
    optional = {arg["name"] for arg in _schema(rule.op)["args"] if arg["optional"]}
    wanted = {theirs: ours for theirs, ours in rule.results.items() if kept.get(ours) is not None or theirs not in optional}
    arguments.update((theirs, jax.ShapeDtypeStruct(kept[ours].shape, kept[ours].dtype)) for theirs, ours in wanted.items() if kept.get(ours) is not None)
    places = {theirs: spread[ours] for part in rule[1:] for theirs, ours in part.items() if ours in spread}
    made = run(rule.op, places, **arguments, **scalars)
    written = [arg["name"] for arg in _schema(rule.op)["args"] if arg["name"] in wanted]
    return {wanted[theirs]: value for theirs, value in zip(written, made if len(written) > 1 else (made,))}


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        _schema(name)
    except LookupError as error:
        raise AttributeError(str(error)) from None
    function = functools.partial(_run, name)
    function.__doc__ = f"{_schema(name)['summary']}\n\n    {_schema(name)['formula']}"
    globals()[name] = function
    return function


def __dir__():
    return sorted(_native.op_names())
