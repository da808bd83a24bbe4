"""Makes the far device of te-fl's tests (tests/support/far_device.hpp) PyTorch's PrivateUse1 device, under the name `far`.

backend.cpp and ranks.cpp are compiled against PyTorch's headers at first use. Environment: FAR_PLUGIN, the device's plugin (far.so of
the build tree); FAR_ALONE, if set, leaves the plugin out, so that te-fl makes its devices from PyTorch's; FAR_ABSENT, if set, hides
the devices; FAR_BACKEND_DIR, the folder for the compiled backend (default: a temporary folder of the process).
"""

import contextlib
import ctypes
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
import unittest
from typing import Any

import torch
import torch.distributed as dist

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PLUGIN = os.environ.get("FAR_PLUGIN", "")
if "FAR_ALONE" not in os.environ:
    if not pathlib.Path(PLUGIN).is_file():
        raise unittest.SkipTest(f"FAR_PLUGIN is {PLUGIN!r}; it names the plugin of the far device, as ctest sets it")
    os.environ["TE_FL_PLUGIN_MODULES"] = PLUGIN

import te_fl  # noqa: E402

_kept = contextlib.ExitStack()


def compiled(name: str, *flags: str) -> pathlib.Path:
    """Returns the library of the source file NAME.cpp; compiles it if none exists for this Python and PyTorch or the source is newer."""
    folder = os.environ.get("FAR_BACKEND_DIR") or _kept.enter_context(tempfile.TemporaryDirectory())
    os.environ["FAR_BACKEND_DIR"] = folder  # processes that this one starts use the same libraries
    library, source = pathlib.Path(folder) / f"{name}-{torch.__version__}-{sys.implementation.cache_tag}.so", HERE / f"{name}.cpp"
    if library.exists() and library.stat().st_mtime > source.stat().st_mtime:
        return library
    compiler = next(filter(shutil.which, (os.environ.get("CXX", ""), "g++", "c++")), None)
    if compiler is None:
        raise unittest.SkipTest("there is no C++ compiler for PyTorch's headers")
    package = pathlib.Path(torch.__file__).parent
    runtime = sorted((pathlib.Path(te_fl.__file__).parent / "lib").glob("libte_fl.so*"))[-1]  # a wheel contains the library under a single name
    subprocess.run([compiler, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *flags,
                    *(f"-I{path}" for path in (package / "include", package / "include/torch/csrc/api/include", ROOT / "include", ROOT / "tests")), source,
                    "-o", library, f"-L{package / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", runtime.resolve()], check=True)
    return library


def load() -> ctypes.CDLL:
    """Loads the backend without registering it as PyTorch's accelerator."""
    te_fl.info()  # loads te-fl's library first, so that the backend uses the package's copy
    torch.utils.rename_privateuse1_backend("far")
    library = ctypes.CDLL(str(compiled("backend")))
    for count in (library.private_device_allocations, library.private_device_alive):
        count.restype = ctypes.c_int64
    library.private_device_fail_allocation.argtypes = [ctypes.c_int64]
    return library


class Stream(torch.Stream):
    """A stream of the device, as torch.cuda.Stream is. Before PyTorch 2.11 a vendor's class of streams has the handle, and torch.Stream has none."""

    def __new__(cls, device: Any = None, priority: int = 0, **of_another: int) -> Any:
        if of_another:
            return super().__new__(cls, **of_another)
        return super().__new__(cls, device=device or torch.device("far", torch.accelerator.current_device_index()), priority=priority)

    @property
    def far_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    def __new__(cls, **options: Any) -> Any:
        return super().__new__(cls, device="far", **options)


def _current_stream(device: Any = None) -> Stream:
    now = torch.accelerator.current_stream(device)
    return Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)


def _module() -> types.ModuleType:
    """Makes torch.far, the module that PyTorch expects of a backend. Random numbers are the CPU's."""
    module = types.ModuleType("torch.far")
    module.is_available = lambda: module.device_count() > 0
    module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 0 if "FAR_ABSENT" in os.environ else 2
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module.Stream, module.Event = Stream, Event
    module.current_stream = _current_stream
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def start() -> ctypes.CDLL:
    """Loads the backend and registers it as PyTorch's accelerator."""
    library = load()
    library.private_device_register()
    torch._register_device_module("far", _module())
    return library


def ranks_library() -> pathlib.Path:
    abi = [f'-DPYBIND11_{name}="{value}"' for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
           for value in [getattr(torch._C, f"_PYBIND11_{name}", None)] if value is not None]  # PyTorch 2.11 does not need them
    return compiled("ranks", f"-I{sysconfig.get_path('include')}", *abi)


def ranks() -> None:
    """Registers `far_ccl`, a backend of torch.distributed for the device (ranks.cpp), whose transfers are Gloo's."""
    spec = importlib.util.spec_from_file_location("private_device_ranks", ranks_library())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dist.Backend.register_backend("far_ccl", lambda store, rank, count, timeout: module.make(
        dist.ProcessGroupGloo(dist.PrefixStore("far", store), rank, count, timeout)), devices=["far"])
