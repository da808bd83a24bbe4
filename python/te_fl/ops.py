"""te-fl's ops as functions: te_fl.ops.gelu(input=x, output=y). Arguments are keywords; see docs/ops.md.

With PyTorch's tensors, outputs may be left out: te-fl allocates them and returns them, y = te_fl.ops.gelu(input=x). Several are a tuple in the
specification's order. An optional output is allocated if it is True. A dtype requests an output of that dtype; by default it is that of the argument
that docs/ops.md names, or of the first F32, F16 or BF16 input. For other libraries, and for quantised outputs, give the memory; the op returns None.

Each op also takes `stream`: a handle, or an object with cuda_stream or native_handle; default: the current stream of the library that owns the
tensors. Ops with random numbers take `seed` and `offset`; `seed` may be an int64 tensor [2] on the op's device with both values, which is read when
the op runs.
"""

from te_fl import _native

_TYPES = ("Tensor", "sequence of Tensor", "bool", "int", "int", "float", "float", "int or str", "Saved", "sequence of int", "Communicator")
_F32 = 5
_ROLES = ("", ", written", ", read and written")
_RAISES = """Raises:
    te_fl.errors.InvalidArgument: an argument breaks a rule of the op (docs/ops.md).
    te_fl.errors.Unsupported: no implementation supports the call; te_fl.explain says why."""


def _described(name: str) -> str:
    """Signature and description of an op, in the format of C functions' docstrings: the text of ops.pyi, with shapes."""
    op = _native.schema(name)
    if not op["args"]:
        return "An op of Python functions; its arguments and results are theirs."
    named, lines = [], []
    for a in op["args"]:
        default = a["default"]
        if a["type"] == _F32:
            default = float(f"{default:.7g}")  # shortens a float default to the digits in the specification
        required = default is None and not a["optional"] and not a["allocated"]
        named.append((not required, a["name"] if required else f"{a['name']}={default!r}"))
        shape = f" [{a['shape']}]" if a["shape"] else ""
        choice = f", one of {', '.join(a['enum'])}" if a["enum"] else ""
        lines.append(f"    {a['name']}: {_TYPES[a['type']]}{shape}{_ROLES[a['role']]}{', optional' if a['optional'] else ''}"
                     f"{choice}")
    named = [text for _, text in sorted(named, key=lambda of: of[0])] + ["stream=None"] + (["seed=0", "offset=0"] if op["random"] else [])
    rules = [f"Rules: {op['rules']}.", ""] if op["rules"] else []
    return "\n".join([f"{name}($self, /, *, {', '.join(named)})\n--\n", op["summary"], "", op["formula"], "", "Args:", *lines,
                      "    stream: a handle, or an object with cuda_stream or native_handle; None: the tensors' library's current one", "",
                      *rules, _RAISES])


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        op = _native.op(name, _described(name))
    except LookupError as error:
        raise AttributeError(str(error)) from None
    globals()[name] = op
    return op


def __dir__():
    return sorted(_native.op_names())
