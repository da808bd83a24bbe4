"""Op implementations written in Python: OpImpl, BackendImplKind, OpRegistry and OpManager (docs/python-plugins.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import os
import sys
import threading
import traceback
from typing import Any, Callable, Collection, Dict, Iterable, Iterator, List, Optional, Tuple, Union

from te_fl import _native
from te_fl.errors import BY_CODE, InvalidArgument, Unsupported
from te_fl.policy import policy
from te_fl.tensors import DTYPES, SCALINGS

# DLPack's device types by te-fl's names, and the default device types of an implementation that names none.
DEVICE_TYPES = {"cpu": 1, "cuda": 2, "cuda_host": 3, "opencl": 4, "vulkan": 7, "metal": 8, "rocm": 10, "rocm_host": 11, "ext": 12, "oneapi": 14}
TENSORS = ("te_fl", "torch", "numpy")
_CONTEXT = ("stream", "seed", "offset", "deterministic", "capturing", "seed_tensor", "offset_tensor")
_NUMPY_NAMES = {"f64": "float64", "f32": "float32", "f16": "float16", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8",
                "u16": "uint16", "u32": "uint32", "u64": "uint64", "bool": "bool"}
_DTYPE_NAMES = {**{name: name for name in DTYPES}, "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "fp64": "f64",
                "fp32": "f32", "fp16": "f16", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}

# Dtypes of masks, indices and the like, which every implementation must support.
_INTEGERS = tuple(name for name in DTYPES if name[0] in "iu" or name == "bool")


# Fields of OpImpl that apply to catalogue ops only, with the values that count as unset.
_TYPED_ALONE = {"min_arch": (None,), "max_arch": (None,), "scalings": (("none",),), "tensors": ("te_fl",), "in_place": (False,),
                "graph_safe": (False,), "repeat": (None,)}


class BackendImplKind(str, enum.Enum):
    """The kind of an implementation, by which policies refer to it."""

    DEFAULT = "default"
    VENDOR = "vendor"
    REFERENCE = "reference"

    @classmethod
    def _missing_(cls, value: object) -> Optional["BackendImplKind"]:
        return cls.DEFAULT if value == "flagos" else None

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class OpImpl:
    """An implementation of an op.

    op_name, impl_id: the op, and "<kind>.<name>" (rule R16). An op that is not in the catalogue is a function op: fn and supports are called with the
    call's objects unchanged, and fn's return value is the call's result. The descriptions of arguments below apply to catalogue ops; for a function
    op, supported_dtypes and devices apply to the tensors among the objects.
    fn: called with the op's arguments as keywords; writes the outputs in place and returns None. If it raises NotImplementedError (of which
    te_fl.errors.Unsupported is a subclass) or returns NotImplemented, before writing anything, the next candidate is tried. It must name every
    argument of the op's first version, or take **arguments. Arguments added to the op later (te_fl.schema) are passed if fn names them; a call that
    uses others skips this implementation. It may also name stream, seed, offset (as in te_fl.ops), deterministic, capturing, and
    seed_tensor and offset_tensor: u64 [1] tensors on the device if the random state is there (the first replaces seed, the second is added to offset),
    else None.
    vendor: the vendor's name; required for the kind VENDOR.
    priority: 0 means the kind's default: DEFAULT 150, VENDOR 100, REFERENCE 50.
    supported_dtypes: the supported floating-point dtypes; None: any.
    min_arch, max_arch: the range of supported architectures, in the device's numbering (90 for sm_90).
    supports: called with those arguments that it names. Returns True, or False, or the reason of the refusal as text. Tensors are of the class that fn
    gets (supports_tensors); it may read only their metadata, because their memory may not be there yet.
    devices: the supported device types, "cpu", "cuda", "ext:NAME" ..; None: any but ext. An implementation for the host only also runs on copies of
    other devices' tensors.
    scalings: the supported scaling modes. Tensors with a mode other than "none" are passed as te_fl.Quantized.
    tensors: the class of tensors passed to fn: te_fl.LentTensor ("te_fl"), torch.Tensor ("torch") or numpy.ndarray ("numpy"). All of them share the
    caller's memory and are valid during the call. If a tensor cannot be represented as this class, the next candidate is tried.
    supports_tensors: the class of tensors passed to supports; None: that of fn. te_fl.LentTensor ("te_fl") takes the least time.
    thread_safe: several threads may run fn at once. in_place: outputs may share memory with inputs, where the op allows that. deterministic: results
    are bitwise reproducible. graph_safe: may run while its stream is captured into a graph.
    repeat: with tensors "torch", called in place of fn at the second call of a signature (all of a call but addresses, contents and random state), on
    which alone the answer of supports then depends. Does what fn does, and returns a function that later calls of the signature run, or None if there is none. That function takes a list of the call's tensors
    in fn's order of arguments, those of a te_fl.Quantized in the order of its `parts()`, and returns None, or NotImplemented to have fn run.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any]
    vendor: Optional[str] = None
    priority: int = 0
    supported_dtypes: Optional[Collection[str]] = None
    min_arch: Optional[int] = None
    max_arch: Optional[int] = None
    supports: Optional[Callable[..., Union[bool, str]]] = None
    devices: Optional[Collection[str]] = None
    scalings: Collection[str] = ("none",)
    tensors: str = "te_fl"
    thread_safe: bool = True
    in_place: bool = False
    deterministic: bool = False
    graph_safe: bool = False
    repeat: Optional[Callable[..., Optional[Callable[[List[Any]], Any]]]] = None
    supports_tensors: Optional[str] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", BackendImplKind(self.kind))
        for name in ("fn", "supports"):
            value = getattr(self, name)
            if not callable(value) and (name == "fn" or value is not None):
                raise TypeError(f"{self}: {name} is a {type(value).__name__}, which cannot be called")
        if self.kind is BackendImplKind.VENDOR and not self.vendor:
            raise InvalidArgument(f"{self}: an implementation of kind VENDOR names its vendor")
        if self.tensors not in TENSORS:
            raise InvalidArgument(f"{self}: tensors is {self.tensors!r}; it is one of {', '.join(TENSORS)}")
        if self.supports_tensors is not None and self.supports_tensors not in TENSORS:
            raise InvalidArgument(f"{self}: supports_tensors is {self.supports_tensors!r}; it is one of {', '.join(TENSORS)}, or None for that of fn")
        if self.repeat is not None and (self.tensors != "torch" or not callable(self.repeat)):
            raise InvalidArgument(f"{self}: repeat is {self.repeat!r} with tensors {self.tensors!r}; it is a function, and its calls take tensors of the class 'torch'")
        for name in ("supported_dtypes", "devices", "scalings"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{self}: {name} is a str, not a collection of them; write ({getattr(self, name)!r},)")

    def __str__(self) -> str:
        return f"implementation {self.impl_id!r} of op {self.op_name!r}"

    def is_available(self) -> bool:
        """The result of `fn._is_available()` if fn has that function, else True. While it is false, calls are refused."""
        available = getattr(self.fn, "_is_available", None)
        return bool(available()) if callable(available) else True

    @property
    def registered_name(self) -> str:
        """The name of the op in a registry."""
        return self.op_name

    def as_function(self) -> Tuple[Callable[..., Any], Optional[Callable[..., Union[bool, str]]]]:
        """Returns fn and supports as a registry calls them for a function op."""
        for name, left_out in _TYPED_ALONE.items():
            value = getattr(self, name)
            if (tuple(value) if name == "scalings" else value) not in left_out:
                raise InvalidArgument(f"{self}: {name} describes tensors of the catalogue's ops, and {self.op_name!r} is none of them; look at the "
                                      "arguments in supports(), or correct the op's name")

        def supports(*positional: Any, **arguments: Any) -> Union[bool, str]:
            return self.supports_function(positional, arguments) if self.is_available() else "its _is_available() says no"
        limited = self.supports or self.supported_dtypes is not None or self.devices is not None
        return self.fn, supports if limited or callable(getattr(self.fn, "_is_available", None)) else None

    def supports_function(self, positional: tuple, arguments: dict) -> Union[bool, str]:
        """The answer of supported_dtypes, devices and supports to a call of a function op."""
        if self.supported_dtypes is not None or self.devices is not None:
            supported = None if self.supported_dtypes is None else {_DTYPE_NAMES[d] for d in self.supported_dtypes}
            here = None if self.devices is None else {DEVICE_TYPES["ext" if d.startswith("ext:") else d] for d in self.devices}
            for tensor in _tensors((*positional, *arguments.values())):
                dtype = str(tensor.dtype).rpartition(".")[2]
                if supported is not None and "float" in dtype and _DTYPE_NAMES.get(dtype, dtype) not in supported:
                    return f"dtype {dtype} is not supported (supported_dtypes: {', '.join(self.supported_dtypes or ())})"
                if here is not None and tensor.__dlpack_device__()[0] not in here:
                    return f"a tensor's device is not supported (devices: {', '.join(self.devices or ())})"
        return True if self.supports is None else self.supports(*positional, **arguments)


_followers: List[Callable[["OpRegistry", Collection[str]], None]] = []


def watch_registrations(follow: Callable[["OpRegistry", Collection[str]], None]) -> None:
    """Calls follow(registry, names of ops) after implementations were registered or removed."""
    _followers.append(follow)


class Snapshot(List[dict]):
    """The registered implementations: op_name, impl_id, kind, vendor, priority and owner of each."""

    def __init__(self, registry: "OpRegistry", rows: Iterable[dict]) -> None:
        super().__init__(rows)
        self._registry = registry

    @property
    def impls_by_op(self) -> Dict[str, List[OpImpl]]:
        """The implementations by op."""
        found: Dict[str, List[OpImpl]] = {}
        for row in self:
            found.setdefault(row["op_name"], []).append(self._registry._implementation(row))
        return found


class OpRegistry:
    """The implementations of all ops. OpRegistry.instance() is the registry of te_fl.ops; OpRegistry() is a new, empty one, for a separate OpManager.
    """

    _process: Optional["OpRegistry"] = None

    def __init__(self) -> None:
        self._handle = _native.new_registry()
        self._mine: Dict[Tuple[str, str], OpImpl] = {}  # the OpImpl objects registered through this object

    @classmethod
    def instance(cls) -> "OpRegistry":
        if OpRegistry._process is None:
            made = OpRegistry.__new__(OpRegistry)
            made._handle, made._mine = _native.process_registry(), {}
            OpRegistry._process = made
        return OpRegistry._process

    def register_impl(self, impl: OpImpl) -> None:
        """Registers an implementation, for later calls. te_fl.errors.AlreadyExists if the op has an implementation with this impl_id."""
        self.register_many([impl])

    register = register_impl

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Registers all of them, or none."""
        impls = list(impls)
        _native.register(self._handle, [_described(impl, self) for impl in impls], owner())
        self._mine.update({(impl.registered_name, impl.impl_id): impl for impl in impls})
        self._announce({impl.registered_name for impl in impls})

    def get_implementations(self, op_name: str) -> List[OpImpl]:
        """The implementations of an op, including C++ ones, whose fn runs the C++ code. Empty if there are none."""
        return [self._implementation(row) for row in self.snapshot() if row["op_name"] == op_name]

    def get_implementation(self, op_name: str, impl_id: str) -> Optional[OpImpl]:
        return next((impl for impl in self.get_implementations(op_name) if impl.impl_id == impl_id), None)

    def list_operators(self) -> List[str]:
        """The ops that have an implementation."""
        return list(dict.fromkeys(row["op_name"] for row in self.snapshot()))

    def clear(self) -> None:
        """Removes all implementations registered from Python; for OpRegistry() these are all."""
        for op_name, impl_id in [(row["op_name"], row["impl_id"]) for row in self.snapshot() if self._is_mine(row)]:
            self.unregister(op_name, impl_id)

    def _is_mine(self, row: dict) -> bool:
        return (row["op_name"], row["impl_id"]) in self._mine

    def _implementation(self, row: dict) -> OpImpl:
        op_name, impl_id = row["op_name"], row["impl_id"]
        if self._is_mine(row):
            return self._mine[op_name, impl_id]

        def run(**arguments: Any) -> None:
            with policy(per_op={op_name: [f"impl:{impl_id}"]}):
                OpManager(self).call(op_name, **arguments)
        run.__name__ = run.__qualname__ = impl_id
        return OpImpl(op_name, impl_id, BackendImplKind(row["kind"]), run, vendor=row["vendor"] or None, priority=row["priority"])

    def unregister(self, op_name: str, impl_id: str) -> None:
        """Removes an implementation, and returns when no call is running it. te_fl.errors.Busy if called from inside an op."""
        _native.unregister(self._handle, op_name, impl_id)
        self._mine.pop((op_name, impl_id), None)
        self._announce({op_name})

    def unregister_owner(self, name: str) -> None:
        """Removes all implementations registered by `name`: a plugin, a module, or "python" for the program itself."""
        theirs = [(row["op_name"], row["impl_id"]) for row in _native.snapshot(self._handle) if row["owner"] == name]
        _native.unregister_owner(self._handle, name)
        for key in theirs:
            self._mine.pop(key, None)
        self._announce({op_name for op_name, _ in theirs})

    def is_process(self) -> bool:
        """True for the registry of the process, which te_fl.ops uses."""
        return self._mine is OpRegistry.instance()._mine

    def registered(self) -> Iterable[OpImpl]:
        """The OpImpl objects registered through this object."""
        return self._mine.values()

    def _announce(self, names: Collection[str]) -> None:
        for follow in _followers:
            follow(self, names)

    def set_priority(self, op_name: str, impl_id: str, priority: int) -> None:
        _native.set_priority(self._handle, op_name, impl_id, priority)

    def snapshot(self) -> Snapshot:
        """The registered implementations, including C++ ones: a list of dicts with the method impls_by_op."""
        return Snapshot(self, _native.snapshot(self._handle))


class OpManager:
    """Runs ops with the implementations of a registry. OpManager.instance() is the process's manager, which te_fl.ops uses."""

    def __init__(self, registry: Optional[OpRegistry] = None) -> None:
        self.registry = OpRegistry() if registry is None else registry
        self._handle = _native.new_manager(self.registry._handle)

    @classmethod
    def instance(cls) -> "OpManager":
        return cls(OpRegistry.instance())

    def call(self, op_name: str, /, *positional: Any, **arguments: Any) -> Any:
        """Runs an op. A catalogue op takes the keywords of te_fl.ops and returns None; a function op takes and returns what its implementations do.
        """
        return _native.call(op_name, arguments, self._handle, positional)

    def explain(self, op_name: str, /, *positional: Any, **arguments: Any) -> dict:
        """Describes how the call would be dispatched, as te_fl.explain. Without arguments, describes a host call with no further information."""
        if not positional and not arguments:
            return _native.explain(op_name, "cpu", [], [], self._handle)
        return _native.resolve(op_name, arguments, self._handle, positional)

    def resolve(self, op_name: str) -> Callable[..., Any]:
        """The function of the first candidate under the policy in force, independent of a call: `fn` of the first of resolve_candidates(). Unlike
        call(), the function does not check `supports` and does not fall back to the next candidate.
        """
        return self.resolve_candidates(op_name)[0].fn

    def resolve_candidates(self, op_name: str) -> List[OpImpl]:
        """The implementations that the policy in force would try, in order. te_fl.errors.Unsupported if there are none."""
        found = [c["impl_id"] for c in self.explain(op_name)["candidates"] if c["accepted"]]
        known = {impl.impl_id: impl for impl in self.registry.get_implementations(op_name)}
        impls = [known[impl_id] for impl_id in found if impl_id in known and known[impl_id].is_available()]
        if not impls:
            raise Unsupported(f"op {op_name!r} has no implementation that the policy allows; registered: {', '.join(known) or 'none'}")
        return impls

    def get_selected_impl_id(self, op_name: str) -> str:
        """The impl_id of the implementation that resolve() returns."""
        return self.resolve_candidates(op_name)[0].impl_id

    def ensure_initialized(self) -> None:
        """Loads plugins now instead of at the first op."""
        _native.op_names()

    def bump_policy_epoch(self) -> None:
        """Reads TE_FL_ variables again, as te_fl.reload()."""
        _native.reload()

    def usage(self) -> List[dict]:
        """The implementations that ran this manager's calls, as te_fl.usage()."""
        return _native.usage(self._handle)

    def reset_usage(self) -> None:
        _native.reset_usage(self._handle)


_owner = threading.local()


def owner() -> str:
    """The owner of registrations on this thread: the module being loaded, else "python"."""
    return getattr(_owner, "name", "python")


@contextlib.contextmanager
def owned_by(name: str) -> Iterator[None]:
    before = owner()
    _owner.name = name
    try:
        yield
    finally:
        _owner.name = before


# ---- data for the native module

def _parameters(fn: Callable[..., Any], what: str) -> Tuple[List[str], List[str], bool]:
    """Names of fn's keyword parameters, the required ones among them, and whether it accepts **keywords."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # C functions may have no signature
        return [], [], True
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY:
            raise TypeError(f"{what} takes {p.name!r} by position only; arguments of ops are keywords")
    return [p.name for p in named], [p.name for p in named if p.default is p.empty], any(p.kind is p.VAR_KEYWORD for p in parameters)


def _taken(impl: OpImpl, fn: Callable[..., Any], what: str, known: List[str]) -> Tuple[List[str], bool]:
    named, required, open_ended = _parameters(fn, f"{impl}: {what}")
    unknown = [name for name in required if name not in known and name not in _CONTEXT]
    if unknown:
        raise TypeError(f"{impl}: {what} takes {unknown[0]!r}, which the op has not; it has {', '.join(known)}, and every call has "
                        f"{', '.join(_CONTEXT)}")
    return [name for name in named if name in known or name in _CONTEXT], open_ended


def _mask(impl: OpImpl, what: str, names: Iterable[str], numbers: dict) -> int:
    mask = 0
    for name in names:
        if name not in numbers:
            raise InvalidArgument(f"{impl}: {what} {name!r} is not known; it is one of {', '.join(numbers)}")
        mask |= 1 << numbers[name]
    return mask


def _described(impl: OpImpl, registry: OpRegistry) -> dict:
    """Converts an OpImpl to the fields of te_fl_op_desc."""
    if not isinstance(impl, OpImpl):
        raise TypeError(f"an implementation is a te_fl.OpImpl, not a {type(impl).__name__}")
    if _native.declare(registry._handle, impl.registered_name):
        return _described_function(impl)
    args = _native.schema(impl.op_name)["args"]
    if any(a["type"] == 10 for a in args):
        raise Unsupported(f"{impl}: collectives can be implemented only in C++: Python implementations get no communicator")
    handed = [a["name"] for a in args if a["type"] != 8]  # the records that a forward saves are not passed to Python
    later = [a["name"] for a in args if a["later"]]
    taken, open_ended = _taken(impl, impl.fn, "fn", handed)
    missing = [name for name in handed if name not in taken and name not in later]
    if missing and not open_ended:
        raise TypeError(f"{impl}: fn does not take {missing[0]!r}, which calls may set; name every argument of the op, or take **arguments")
    declared = [name for name in taken if name in later]
    arguments = taken + (missing if open_ended else [])
    supports, supports_arguments = _supports(impl, [name for name in handed if name not in later or name in declared])
    return {
        **_common(impl), "arguments": arguments, "supports": supports, "supports_arguments": supports_arguments,
        "convert": {"te_fl": None, "torch": _as_torch, "numpy": _as_numpy}[impl.tensors],
        "supports_convert": {"te_fl": None, "torch": _like_torch, "numpy": _like_numpy}[impl.supports_tensors or impl.tensors],
        "later_args": " ".join(declared) or None, **_constraints(impl),
    }


def _common(impl: OpImpl) -> dict:
    flags = (impl.thread_safe, impl.graph_safe, impl.deterministic, impl.in_place)
    return {
        "op_name": impl.registered_name, "impl_id": impl.impl_id, "kind": ["default", "vendor", "reference"].index(impl.kind.value),
        "priority": impl.priority, "vendor": impl.vendor, "fn": impl.fn, "convert": None, "repeat": impl.repeat, "later_args": None,
        "words": f"Python function {getattr(impl.fn, '__module__', '?')}.{getattr(impl.fn, '__qualname__', type(impl.fn).__name__)}",
        "flags": sum(1 << bit for bit, on in enumerate(flags) if on), "min_arch": impl.min_arch or 0, "max_arch": impl.max_arch or 0,
    }


def _described_function(impl: OpImpl) -> dict:
    """The descriptor of a function op's implementation. C++ cannot inspect the op's arguments, so constraints on them are part of supports()."""
    _constraints(impl)  # raises for unknown names
    function, supports = impl.as_function()
    every = {"dtypes": (1 << len(DTYPES)) - 1, "scalings": 1, "provider": None,
             "device_types": sum(1 << number for name, number in DEVICE_TYPES.items() if name != "ext")}
    return {**_common(impl), "fn": function, "supports": supports, "min_arch": 0, "max_arch": 0, **every}


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    """The tensors among a call's objects, including those in lists, tuples and dicts."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif hasattr(value, "dtype") and hasattr(value, "__dlpack_device__"):
            yield value


def _constraints(impl: OpImpl) -> dict:
    """Device types, dtypes and scaling modes, as bit masks."""
    providers = sorted({d[4:] for d in impl.devices or () if d.startswith("ext:")})
    if len(providers) > 1:
        raise InvalidArgument(f"{impl}: devices of several providers are named, {', '.join(providers)}; register one implementation for each")
    devices = [d for d in DEVICE_TYPES if d != "ext"] if impl.devices is None else ["ext" if d.startswith("ext:") else d for d in impl.devices]
    dtypes = DTYPES if impl.supported_dtypes is None else (*impl.supported_dtypes, *_INTEGERS)
    return {
        "provider": providers[0] if providers else None,
        "device_types": _mask(impl, "device", devices, DEVICE_TYPES),
        "dtypes": _mask(impl, "dtype", dtypes, {name: DTYPES.index(known) for name, known in _DTYPE_NAMES.items()}),
        "scalings": _mask(impl, "scaling", impl.scalings, {name: i for i, name in enumerate(SCALINGS)}),
    }


def _supports(impl: OpImpl, handed: List[str]) -> Tuple[Optional[Callable[..., Union[bool, str]]], List[str]]:
    asked = impl.supports
    arguments: List[str] = []
    if asked is not None:
        arguments, open_ended = _taken(impl, asked, "supports", handed)
        arguments += [name for name in handed if open_ended and name not in arguments]
    if not callable(getattr(impl.fn, "_is_available", None)):
        return asked, arguments

    def available(**arguments_of_call: Any) -> Union[bool, str]:
        if not impl.is_available():
            return "its _is_available() says no"
        return True if asked is None else asked(**arguments_of_call)
    return available, arguments


def _as_torch(tensor: Any) -> Any:
    try:
        return tensor.torch()
    except (ImportError, BufferError, RuntimeError, TypeError) as error:
        raise Unsupported(f"PyTorch takes no tensor of {tensor.dtype} on {tensor.device}: {error}") from error


def _as_numpy(tensor: Any) -> Any:
    try:
        return tensor.numpy()
    except (ImportError, BufferError) as error:
        raise Unsupported(f"NumPy takes no tensor of {tensor.dtype} on {tensor.device}: {error}") from error


def _like_torch(tensor: Any) -> Any:
    """A PyTorch tensor like the one that fn gets, without its memory."""
    from te_fl import torch_metadata  # imports PyTorch, whose tensors the implementation wants
    return torch_metadata.tensor(tensor)


def _like_numpy(tensor: Any) -> Any:
    """An array like the one that fn gets, of zeros."""
    import numpy
    if tensor.dtype not in _NUMPY_NAMES:
        raise Unsupported(f"NumPy takes no tensor of {tensor.dtype} on {tensor.device}")
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides)) if 0 not in tensor.shape else 0
    memory = numpy.zeros(last + 1, _NUMPY_NAMES[tensor.dtype])
    return numpy.lib.stride_tricks.as_strided(memory, tensor.shape, [stride * memory.itemsize for stride in tensor.strides], writeable=tensor.writable)


def _describe_error(error: BaseException) -> Tuple[str, str]:
    """Returns (status code, one-line description) of an exception raised by an implementation.

    Clears the local variables of the exception's frames, because they may be arrays in memory that was lent only for the call.
    """
    code = next((code for code, kind in BY_CODE.items() if isinstance(error, kind)), None)
    if code is None:
        full = MemoryError, getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
        code = "UNSUPPORTED" if isinstance(error, NotImplementedError) else "OUT_OF_MEMORY" if isinstance(error, full) else "INTERNAL"
    text = traceback.format_exception_only(type(error), error)[-1].strip().replace(f": {code}: ", ": ", 1)  # the status has the code
    trace = traceback.extract_tb(error.__traceback__)
    if trace:
        text += f" ({os.path.basename(trace[-1].filename)}:{trace[-1].lineno} in {trace[-1].name})"
    seen: List[Optional[BaseException]] = [None, sys.exc_info()[1]]  # excludes an exception that the caller is handling
    link: Optional[BaseException] = error
    while link not in seen:
        seen.append(link)
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return code, text


def _on_stream(fn: Callable[..., Any], positional: tuple, keywords: Optional[dict], device_type: int, index: int, stream: int) -> Any:
    """Runs fn with the call's stream as PyTorch's current stream, if the device is one of PyTorch's."""
    torch = sys.modules.get("torch")
    keywords = keywords or {}
    if torch is not None and device_type == DEVICE_TYPES["ext"]:
        from te_fl import torch_streams  # imports PyTorch, which is loaded already
        device = torch.device(torch_streams.private_name(), index)
        if not torch_streams.is_accelerator(device.type):
            return fn(*positional, **keywords)
        with torch_streams.on_stream(device, stream):
            return fn(*positional, **keywords)
    if torch is None or device_type not in (DEVICE_TYPES["cuda"], DEVICE_TYPES["rocm"]):
        return fn(*positional, **keywords)
    if not torch.cuda.is_initialized():
        if not torch.cuda.is_available():
            return fn(*positional, **keywords)
        torch.cuda.init()
    if torch._C._cuda_getCurrentRawStream(index) == stream and torch._C._cuda_getDevice() == index:
        return fn(*positional, **keywords)
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=index) if stream else torch.cuda.default_stream(index)):
        return fn(*positional, **keywords)


_native.set_registration_helpers(_describe_error, _on_stream)
