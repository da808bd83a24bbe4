"""Makes the Python package transformer_engine load te-fl's module instead of its compiled extension.

A finder at the front of sys.meta_path finds the installed transformer_engine.common as usual, with two changes. During its import it loads no shared
libraries (as during its own build, with NVTE_PROJECT_BUILDING). Its load_framework_extension("torch") installs te_fl.transformer_engine_torch instead
of the extension. The same finder starts the emulation of CUDA when torch is imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import pathlib
import sys
from types import ModuleType
from typing import Any, Callable, Optional

from te_fl import _native, tex_form
from te_fl.compat import finder
from te_fl.errors import Unsupported

_COMMON, _EXTENSION = "transformer_engine.common", "transformer_engine_torch"
OLDEST, NEWEST = (2, 14), (2, 20)
_BUILDING = "NVTE_PROJECT_BUILDING"


def parse_version(text: str) -> tuple:
    """The leading numbers of a version string, as a tuple."""
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _dotted(version: tuple) -> str:
    return ".".join(map(str, version))


def _check_version(found: str) -> None:
    if parse_version(found) < OLDEST:
        raise Unsupported(f"transformer_engine {found} is older than {_dotted(OLDEST)}, the oldest whose extension module te-fl knows; "
                          "install a newer one")


def _refuse_unknown(module: ModuleType, found: str) -> None:
    """For a version newer than te-fl supports: lists functions that the package calls in unknown forms, and replaces them by functions that raise an
    error.
    """
    from te_fl.transformer_engine_torch import absent
    from te_fl.inside import calls
    spec = importlib.util.find_spec("transformer_engine")
    unknown = calls.unknown(calls.of_package(pathlib.Path(spec.origin).parent), vars(module))
    for name, why in unknown.items():
        setattr(module, name, absent.refused(name, f"{why}, and transformer_engine {found} is newer than {_dotted(NEWEST)}, the newest that te-fl knows"))
    named = f"; refused by name: {', '.join(sorted(unknown))}" if unknown else ""
    print(f"te-fl knows transformer_engine up to {_dotted(NEWEST)} and is not tested with {found}{named}", file=sys.stderr)


def extension() -> ModuleType:
    """te-fl's module, adapted to the installed version of the package. te_fl.errors.Unsupported if that is too old."""
    found = importlib.metadata.version("transformer_engine")
    _check_version(found)
    from te_fl import transformer_engine_torch
    from te_fl.transformer_engine_torch import older
    older.adopt(transformer_engine_torch, parse_version(found))
    if parse_version(found)[:2] > NEWEST:
        _refuse_unknown(transformer_engine_torch, found)
    _native.op_names()  # loads plugins, so that the package finds their functions wherever it keeps one
    tex_form.serve_package()
    tex_form.install(transformer_engine_torch)
    return transformer_engine_torch


def _get_attention_backend(attention_params: Any = None) -> Any:
    """The package's own choice. TransformerEngine-FL's package calls the extension instead, so that vendors can choose."""
    utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    return utils._original_get_attention_backend(attention_params)


def load_framework_extension(framework: str) -> None:
    if framework == "torch_nv":  # TransformerEngine-FL's package
        importlib.import_module("te_fl.transformer_engine_torch").get_attention_backend = _get_attention_backend
    elif framework != "torch":
        # For other frameworks, ImportError makes the package's top level continue without them.
        raise ImportError(f"te-fl supports the PyTorch side of transformer_engine only; for {framework} use te_fl.{framework}")
    sys.modules[_EXTENSION] = extension()


class _Loader(importlib.abc.Loader):
    """Wraps a loader, to run code around the module's execution."""

    def __init__(self, loader: Any, execute: Callable[[Any, ModuleType], None]):
        self._loader, self._execute = loader, execute

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._execute(self._loader, module)

    def __getattr__(self, name: str) -> Any:  # get_data, get_source and other methods that tools call
        return getattr(self._loader, name)


def _execute_common(loader: Any, module: ModuleType) -> None:
    before = {name: os.environ.get(name) for name in (_BUILDING, "NVTE_RELEASE_BUILD")}
    os.environ[_BUILDING] = "1"
    os.environ.pop("NVTE_RELEASE_BUILD", None)
    try:
        loader.exec_module(module)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    module.load_framework_extension = load_framework_extension


def _answer_for_cuda(device: str) -> None:
    if device == "cpu":
        from te_fl.inside import host_device
        host_device.install()
    else:
        from te_fl.inside import other_device
        other_device.install(device)


def _execute_torch(device: str) -> Callable[[Any, ModuleType], None]:
    def execute(loader: Any, module: ModuleType) -> None:
        loader.exec_module(module)
        _answer_for_cuda(device)

    return execute


def _execute_patterns(loader: Any, module: ModuleType) -> None:
    """PyTorch's inductor traces its patterns with GPU tensors if CUDA is available; this makes it run under the emulation."""
    loader.exec_module(module)
    for name in ("te_fl.inside.host_device", "te_fl.inside.other_device"):
        if name in sys.modules:
            sys.modules[name].trace_patterns(module)


def _execute_root(device: str) -> Callable[[Any, ModuleType], None]:
    """TransformerEngine-FL's package compares the types of its tensors' devices with one of its own."""
    def execute(loader: Any, module: ModuleType) -> None:
        loader.exec_module(module)
        if hasattr(module, "TE_DEVICE_TYPE"):
            module.TE_DEVICE_TYPE = device

    return execute


def _enable_fp16(module: ModuleType) -> None:
    """Accelerate silently ignores mixed_precision="fp16" on a device of type cpu, and under the emulation torch.device("cuda") is such a device.
    Unless the program has requested the CPU, this patch enables Accelerate's behaviour on a GPU: autocast to FP16, and a loss scaler. module:
    accelerate.accelerator.
    """
    init = module.Accelerator.__init__

    @functools.wraps(init)
    def with_fp16(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        if self.state.mixed_precision == "fp16" and not self.native_amp and not self.state._cpu and self.device.type == "cpu":
            settings = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.native_amp, self.scaler = True, module.get_grad_scaler(self.distributed_type, **settings)

    module.Accelerator.__init__ = with_fp16


def _execute_accelerator(loader: Any, module: ModuleType) -> None:
    loader.exec_module(module)
    _enable_fp16(module)


def _execute_quantization(loader: Any, module: ModuleType) -> None:
    """The package derives the supported formats from the GPU's generation; te-fl's ops support all of them on every device."""
    loader.exec_module(module)
    for name in ("check_mxfp8_support", "check_nvfp4_support"):
        setattr(module, name, lambda: (True, ""))


def _execute_padding(loader: Any, module: ModuleType) -> None:
    """Replaces the Triton kernel used under sequence parallelism, which zero-pads NVFP4's scales to multiples of 128 and 4."""
    loader.exec_module(module)

    def pad_columnwise_scale_inv(inp: Any) -> Any:
        rows, columns = inp.shape
        return sys.modules["torch"].nn.functional.pad(inp, (0, -columns % 4, 0, -rows % 128))

    module.pad_columnwise_scale_inv = pad_columnwise_scale_inv


def _execute_kernels(loader: Any, module: ModuleType) -> None:
    loader.exec_module(module)
    from te_fl.inside import host_kernels
    host_kernels.adopt(module)


def _execute_block_storage(loader: Any, module: ModuleType) -> None:
    """An MXFP8 or NVFP4 tensor moves itself to its CUDA device before it is dequantised. This patch skips the move, since the tensor is there already;
    below autograd PyTorch would copy its dequantised values.
    """
    loader.exec_module(module)

    def to(self: Any, *arguments: Any, **options: Any) -> Any:
        if not arguments and options.keys() == {"device"} and str(options["device"]).split(":")[0] in ("cuda", self.device.type):
            return self
        return sys.modules["torch"].Tensor.to(self, *arguments, **options)

    for name in {"MXFP8TensorStorage", "NVFP4TensorStorage"} & vars(module).keys():
        getattr(module, name).to = to


def _execute_quantized_tensor(loader: Any, module: ModuleType) -> None:
    """Before 2.18 the package's tensors cache requires_grad, which autograd does not update, so gradients of computed tensors are missing. This patch
    corrects it.
    """
    loader.exec_module(module)
    if parse_version(importlib.metadata.version("transformer_engine")) < (2, 18):
        for name in {"requires_grad", "requires_grad_"} & vars(module.QuantizedTensor).keys():
            delattr(module.QuantizedTensor, name)


def _execute_context_parallel(loader: Any, module: ModuleType) -> None:
    """With all_gather, the package trims a step's keys as if a non-causal window were aligned to the step's last key, but then requests a window
    aligned to the first. Some steps, and therefore some ranks, would fail while others compute. This patch refuses the call on every rank before any
    communication.
    """
    loader.exec_module(module)
    forward = module.attn_forward_func_with_cp
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def checked(*arguments: Any, **options: Any) -> Any:
        call = signature.bind(*arguments, **options).arguments
        size, mask = call.get("window_size"), call.get("attn_mask_type", "causal")
        if call["cp_comm_type"] == "all_gather" and call.get("use_fused_attention") and "causal" not in mask and size not in (None, (-1, -1), (-1, 0)):
            raise Unsupported(f"attention: window_size = {size} with attn_mask_type {mask!r} and cp_comm_type 'all_gather' is not supported; give a causal "
                              "mask, or cp_comm_type='a2a'")
        return forward(*arguments, **options)

    module.attn_forward_func_with_cp = checked


def _execute_attention_backends(loader: Any, module: ModuleType) -> None:
    """Version 2.19 passes fused attention its packed input besides the parts that are differentiated. If attention is recomputed, the packed input
    still belongs to the forward's graph, and the recomputation's backward would run through it and fail with "ctx must have .tensor_objects". This
    patch corrects it.
    """
    loader.exec_module(module)
    if parse_version(importlib.metadata.version("transformer_engine"))[:2] != (2, 19):
        return
    forward = module.FusedAttention.forward

    @functools.wraps(forward)
    def of_values(*arguments: Any, **options: Any) -> Any:
        for name in ("packed_qkv", "packed_kv"):
            if options.get(name) is not None:
                options[name] = options[name].detach()
        return forward(*arguments, **options)

    module.FusedAttention.forward = of_values


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, executions: dict):
        self._executions = executions

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        execute = self._executions.get(fullname)
        if execute is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, execute)
        return spec


_CONTEXT_PARALLEL = {"transformer_engine.pytorch.attention.dot_product_attention.context_parallel": _execute_context_parallel}
_STORAGES, _ACCELERATOR = "transformer_engine.pytorch.tensor.storage", "accelerate.accelerator"
# With a device in CUDA's place.
_ON_DEVICE = {"transformer_engine.pytorch.quantization": _execute_quantization, "transformer_engine.pytorch.triton.pad": _execute_padding,
              "torch._inductor.fx_passes.joint_graph": _execute_patterns,
              **dict.fromkeys((f"transformer_engine.pytorch.triton.{name}" for name in ("permutation", "cross_entropy", "grouped_dbias_dscales")),
                              _execute_kernels),
              f"{_STORAGES}.mxfp8_tensor_storage": _execute_block_storage, f"{_STORAGES}.nvfp4_tensor_storage": _execute_block_storage}


def install_beside_extension() -> None:
    """For NVTE_PLUGIN, which keeps NVIDIA's extension: installs only those patches of install() that make the package refuse unsupported calls."""
    sys.meta_path.insert(0, _Finder(_CONTEXT_PARALLEL))


def install(device: Optional[str]) -> None:
    """device: the type of the device that takes CUDA's place from the import of torch on; None: CUDA devices are PyTorch's own."""
    executions: dict = {_COMMON: _execute_common, "transformer_engine.pytorch.quantized_tensor": _execute_quantized_tensor, **_CONTEXT_PARALLEL,
                        "transformer_engine.pytorch.attention.dot_product_attention.backends": _execute_attention_backends,
                        **({} if device is None else {"transformer_engine": _execute_root(device), **_ON_DEVICE}), **({_ACCELERATOR: _execute_accelerator} if device == "cpu" else {})}
    if device is not None and "torch" in sys.modules:
        _answer_for_cuda(device)
    elif device is not None:
        executions["torch"] = _execute_torch(device)
    if device == "cpu" and (accelerator := sys.modules.get(_ACCELERATOR)) is not None:
        _enable_fp16(accelerator)
    sys.meta_path.insert(0, _Finder(executions))
    finder.find_plugin_core()
