"""Makes the far device of te-fl's tests (tests/support/far_device.hpp) PyTorch's PrivateUse1 device, under the name `far`.

backend.cpp is compiled against PyTorch's headers at first use. Environment: FAR_PLUGIN, the device's plugin (far.so of
the build tree); FAR_ALONE, if set, leaves the plugin out, so that te-fl makes its devices from PyTorch's; FAR_BACKEND_DIR, the folder for the compiled backend (default: a temporary folder of the process).
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile
import types
import unittest

import torch

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PLUGIN = os.environ.get("FAR_PLUGIN", "")
if "FAR_ALONE" not in os.environ:
    if not pathlib.Path(PLUGIN).is_file():
        raise unittest.SkipTest(f"FAR_PLUGIN is {PLUGIN!r}; it names the plugin of the far device, as ctest sets it")
    os.environ["TE_FL_PLUGIN_MODULES"] = PLUGIN

import te_fl  # noqa: E402

_kept = contextlib.ExitStack()


def _compiled() -> pathlib.Path:
    """Returns the backend's compiled library; compiles it if none exists for this PyTorch or the source is newer."""
    folder = os.environ.get("FAR_BACKEND_DIR") or _kept.enter_context(tempfile.TemporaryDirectory())
    library = pathlib.Path(folder) / f"private_device-{torch.__version__}.so"
    source = HERE / "backend.cpp"
    if library.exists() and library.stat().st_mtime > source.stat().st_mtime:
        return library
    compiler = next(filter(shutil.which, (os.environ.get("CXX", ""), "g++", "c++")), None)
    if compiler is None:
        raise unittest.SkipTest("there is no C++ compiler for PyTorch's headers")
    package = pathlib.Path(torch.__file__).parent
    runtime = sorted((pathlib.Path(te_fl.__file__).parent / "lib").glob("libte_fl.so*"))[-1]  # a wheel contains the library under a single name
    subprocess.run([compiler, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                    *(f"-I{path}" for path in (package / "include", package / "include/torch/csrc/api/include", ROOT / "include", ROOT / "tests")), source,
                    "-o", library, f"-L{package / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", runtime.resolve()], check=True)
    return library


def load() -> ctypes.CDLL:
    """Loads the backend without registering it as PyTorch's accelerator."""
    te_fl.info()  # loads te-fl's library first, so that the backend uses the package's copy
    torch.utils.rename_privateuse1_backend("far")
    library = ctypes.CDLL(str(_compiled()))
    for count in (library.private_device_allocations, library.private_device_alive):
        count.restype = ctypes.c_int64
    return library


def _module() -> types.ModuleType:
    """Makes torch.far, the module that PyTorch expects of a backend. Random numbers are the CPU's."""
    module = types.ModuleType("torch.far")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    if not hasattr(torch.Stream, "native_handle"):  # before PyTorch 2.11 a vendor's class of streams has the handle
        module.Stream = _Stream
    return module


class _Stream:
    def __init__(self, stream_id: int, device_index: int, device_type: int):
        self._id = stream_id

    @property
    def far_stream(self) -> int:
        return self._id


def start() -> ctypes.CDLL:
    """Loads the backend and registers it as PyTorch's accelerator."""
    library = load()
    library.private_device_register()
    torch._register_device_module("far", _module())
    return library
