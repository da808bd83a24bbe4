"""The ops by name: te_fl.ops.gelu(input=x, output=y). Arguments are keywords, outputs are given; see docs/ops.md.

Each takes also `stream` (a handle, or an object with cuda_stream or native_handle; left out: the current stream of the library that the tensors are of),
and ops with random numbers `seed` and `offset`.
"""

from te_fl import _native


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        op = _native.op(name)
    except LookupError as error:
        raise AttributeError(str(error)) from None
    globals()[name] = op
    return op


def __dir__():
    return sorted(_native.op_names())
