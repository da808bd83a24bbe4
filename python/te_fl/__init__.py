"""te-fl: a Transformer operator runtime for every chip. Calls ops by name on tensors of any DLPack library, and reports which implementations ran."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Optional, Sequence

try:
    from te_fl import _native
except ImportError as error:
    from te_fl import missing
    reason = missing.native()
    if reason is None:
        raise
    raise ImportError(reason) from error
from te_fl import errors
from te_fl.errors import Error
from te_fl.tensors import DTYPES, SCALINGS, Quantized, QuantizedNames, QuantizedTarget, Rows, Saved, Tensor

_native.set_classes(errors.BY_CODE, Quantized, Saved, Rows)
_native.quantized_target(QuantizedTarget)
_native.quantized_class(Quantized, QuantizedNames("data", "columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax", "scale",
                                                  scaling="_scaling", flags="_flags", amax_epsilon="amax_epsilon", shape="shape"))

from te_fl import ops  # noqa: E402  (needs the classes)
from te_fl.policy import policy, policy_text  # noqa: E402

if TYPE_CHECKING:
    from te_fl.registration import BackendImplKind, OpImpl, OpManager, OpRegistry

LentTensor = _native.LentTensor
_REGISTRATION = ("BackendImplKind", "OpImpl", "OpManager", "OpRegistry")


def _load_modules(*arguments: Any) -> list:
    """Loads plugins that are Python modules. Called at the first op, together with other plugins, so that importing te_fl stays fast."""
    from te_fl import _modules
    return _modules.load(*arguments)


def _make_device(*device: Any) -> Any:
    """Makes a te-fl device of one that PyTorch has. Called when a device is looked up that no plugin serves."""
    if "torch" not in sys.modules:
        return None
    from te_fl import torch_device
    return torch_device.find(*device)


_native.set_module_loader(_load_modules)
_native.set_device_maker(_make_device)


def __getattr__(name: str) -> Any:
    if name not in _REGISTRATION:
        raise AttributeError(f"module 'te_fl' has no attribute {name!r}{errors.did_you_mean(name, __all__)}")
    from te_fl import registration
    globals().update((n, getattr(registration, n)) for n in _REGISTRATION)
    return globals()[name]


__version__ = "0.1.0"
__all__ = ["BackendImplKind", "Error", "LentTensor", "OpImpl", "OpManager", "OpRegistry", "Quantized", "Rows", "Saved", "Tensor",
           "as_transformer_engine", "errors", "explain", "fingerprint", "info", "inside_transformer_engine", "load_plugin", "ops", "policy", "policy_text", "reload", "reset_usage",
           "saved_bytes", "schema", "step_boundary", "usage", "verify_counts", "write_trace"]


def explain(op: str, /, *positional: Any, device: str = "cpu", dtypes: Sequence[str] = (), scalings: Sequence[str] = (),
            **arguments: Any) -> dict:
    """Describes how a call would be dispatched: each candidate with the reason for its acceptance or rejection, the chosen one, and its kernel.

    Pass the op's arguments for a concrete call, or the device, dtypes and scaling modes for a described one. Function ops may have positional
    arguments; so has the form of an op with Transformer Engine's arguments (docs/transformer-engine-functions.md). If functions of that form are
    registered, a described call has it under "tex".
    """
    form = sys.modules.get("te_fl.tex_form")
    of_form = None
    if form is not None and (positional or not arguments):
        of_form = form.explain(op, positional, arguments)
        if of_form is not None and (positional or not form.is_typed(op)):
            return of_form
    if arguments or positional:
        return _native.resolve(op, arguments, None, positional)
    for names, known, what in ((dtypes, DTYPES, "dtype"), (scalings, SCALINGS, "scaling")):
        if isinstance(names, str):
            raise TypeError(f"explain: {what}s is {names!r}; it is a list of names, such as [{names!r}]")
        for name in names:
            if name not in known:
                raise errors.InvalidArgument(f"{what} {name!r} is not known{errors.did_you_mean(str(name).split('.')[-1], known)}; it is one of {', '.join(known)}")
    made = _native.explain(op, device, [DTYPES.index(d) for d in dtypes], [SCALINGS.index(s) for s in scalings])
    return made if of_form is None else {**made, "tex": of_form}


def step_boundary() -> None:
    """Declares that a training step has ended; the optimizers of te_fl.pytorch do. All ranks of a job call it alike: there they agree on the
    implementations that TE_FL_VERIFY_ACTION=quarantine bars, which none of them uses from its next call on.
    """
    _native.step_boundary()


def saved_bytes(op: str, **arguments: Any) -> int:
    """Bytes of storage that te_fl.Saved needs for this forward call; usually 0."""
    return _native.saved_bytes(op, arguments)


def schema(op: str) -> dict:
    """Arguments, formula and rules of an op."""
    return _native.schema(op)


def info() -> dict:
    """Version, devices and plugins."""
    return _native.info()


class Usage(list):
    """The rows (dicts) of usage(); printing shows a table."""

    def __str__(self) -> str:
        rows = [("op", "implementation", "calls", "staged"), *((u["op"], u["impl_id"], str(u["calls"]), str(u["staged_calls"])) for u in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(f"{op:{widths[0]}}  {impl:{widths[1]}}  {calls:>{widths[2]}}  {staged:>6}" for op, impl, calls, staged in rows)


def usage() -> Usage:
    """The implementations that ran calls since reset_usage(), and their numbers of calls, most calls first. "form" is "tex" for calls with Transformer
    Engine's arguments, else "typed".
    """
    return Usage({**row, "op": row["op"].removeprefix("tex::"), "form": "tex" if row["op"].startswith("tex::") else "typed"} for row in _native.usage())


def fingerprint() -> str:
    """A hash of everything that determines dispatch: version, plugins, devices, settings. Ranks with equal fingerprints choose equal implementations;
    `te-fl fingerprint diff` shows differences.
    """
    return _native.fingerprint()


def reset_usage() -> None:
    _native.reset_usage()


def load_plugin(path_or_name: str) -> str:
    """Loads a plugin and returns its name: a shared library, a manifest that names a library, or a Python module with register()."""
    return _native.load_plugin(path_or_name)


def reload() -> None:
    """Reads TE_FL_ variables again: policy and log level."""
    _native.reload()


def verify_counts() -> dict:
    """The results of TE_FL_VERIFY so far, as counts."""
    return _native.verify_counts()


def as_transformer_engine() -> None:
    """Makes `import transformer_engine` import te-fl (docs/transformer-engine.md). Imports no framework."""
    from te_fl.compat import finder
    finder.as_transformer_engine()


def inside_transformer_engine(device: Optional[str] = None) -> None:
    """Makes `import transformer_engine` import NVIDIA's installed Python package, running on te-fl (docs/inside-transformer-engine.md). device="cpu"
    emulates CUDA on the host, for experiments and tests; another type of PyTorch's devices, such as "musa", takes CUDA's place.
    """
    from te_fl import inside
    inside.start(device)


def write_trace() -> None:
    """Writes the events traced so far to the file named by TE_FL_TRACE."""
    _native.write_trace()
