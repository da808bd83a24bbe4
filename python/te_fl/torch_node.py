"""Builds and loads te_fl.pytorch's C++ autograd node (pytorch/autograd/node.cpp), which reduces the host time of small layers. `python -m te_fl
build-node` compiles it for the installed PyTorch, without importing PyTorch. The node is optional: LayerFunction in
te_fl.pytorch.autograd.call computes the same, more slowly.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import warnings
import zlib
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Callable, Optional, Tuple

from te_fl import _native, frameworks
from te_fl.errors import InvalidArgument

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pytorch", "autograd")
SOURCE = os.path.join(FOLDER, "node.cpp")
HEADERS = [os.path.join(FOLDER, name) for name in ("layer_call.hpp", "node_objects.hpp", "plain_forward.hpp")]
COMMAND = f"{os.path.basename(sys.executable)} -m te_fl build-node"


def wanted() -> bool:
    """True unless TE_FL_TORCH_NODE turns the node off. A wrong value makes calls of ops fail, not the import."""
    try:
        return _native.setting("TE_FL_TORCH_NODE")
    except InvalidArgument:
        return True


def installed() -> Optional[Tuple[str, str]]:
    """Returns (PyTorch's folder, torch.__version__); package metadata lacks the version's build suffix. None: not installed."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
                version = re.search(r"^__version__ = ['\"]([^'\"]+)", file.read(), re.M)
        except OSError:
            continue
        if version:
            return folder, version.group(1)
    return None


def path(torch_version: str) -> str:
    """The file name of the node for this PyTorch and this interpreter. The name includes everything that the node depends on, so a node for another
    PyTorch or an older te_fl is never loaded.
    """
    source = 0
    for name in (SOURCE, *HEADERS):
        with open(name, "rb") as file:
            source = zlib.crc32(file.read(), source)
    return os.path.join(FOLDER, f"_node-{source:08x}-torch{torch_version}{sysconfig.get_config_var('EXT_SUFFIX')}")


def load(torch_version: str, *functions: Callable) -> Optional[ModuleType]:
    """Loads the node, whose run() replaces call.run() and calls `functions`, and whose empty() replaces torch_tensors.empty(). None if it is not built,
    or turned off.
    """
    try:
        file = path(torch_version)
    except OSError:  # a package without the source has no node
        return None
    if not wanted() or not os.path.exists(file):
        return None
    try:
        spec = spec_from_file_location("te_fl.pytorch._node", file, loader=ExtensionFileLoader("te_fl.pytorch._node", file))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        warnings.warn(f"te_fl.pytorch's autograd node in C++ cannot be loaded, the one in Python is used: {error}. Build it anew: {COMMAND}",
                      RuntimeWarning, stacklevel=2)
        return None
    module.bind(*functions)
    return module


def _command(root: str, file: str) -> list:
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") or ""]
    if not compiler[0] or not shutil.which(compiler[0]):
        raise FileNotFoundError("no C++ compiler was found: install one (Debian: g++), or name yours in CXX")
    headers = sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(headers, "Python.h")):
        raise FileNotFoundError(f"{headers} has no Python.h: install the headers of this interpreter (Debian: python3-dev)")
    includes = [os.path.join(root, "include"), os.path.join(root, "include", "torch", "csrc", "api", "include"), headers]
    return [*compiler, "-std=c++20", "-O2", "-fPIC", "-shared", *(word for folder in includes for word in ("-isystem", folder)), SOURCE,
            "-o", file, "-L" + os.path.join(root, "lib"), "-lc10", "-ltorch_cpu", "-ltorch_python"]


_TRIAL = """
import torch, te_fl.pytorch as te
from te_fl.pytorch.autograd import call
assert call.run is not call.python_run, "it was not loaded"
module = te.Linear(16, 16, device="cpu")
x = torch.randn(4, 16, dtype=torch.float32, device="cpu", requires_grad=True)
y = module(x)
assert type(y.grad_fn).__module__ != "torch.autograd.function", y.grad_fn
y.sum().backward()
torch.testing.assert_close(x.grad, module.weight.detach().sum(0).expand(4, 16))
"""


def build() -> int:
    """Compiles the node, tests it in a separate process and installs it into the package. Returns the command's exit status."""
    there = installed()
    wrong = "PyTorch is not installed" if there is None else frameworks.refusal("torch", there[1])
    if wrong:
        print(f"te-fl: {wrong}", file=sys.stderr)
        return 1
    if not os.access(FOLDER, os.W_OK):
        print(f"te-fl: {FOLDER} cannot be written: run this as the user who installed te_fl, or install te_fl in a virtual environment", file=sys.stderr)
        return 1
    root, version = there
    file = path(version)
    trial = f"{file}.{os.getpid()}"
    try:
        command = _command(root, trial)
        print(f"compiling {SOURCE} for PyTorch {version}: {command[0]}, some 15 s", flush=True)
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            print(f"{made.stderr}\nte-fl: {shlex.join(command)} failed; the compiler's messages are above", file=sys.stderr)
            return 1
        os.replace(trial, file)
        for older in glob.glob(os.path.join(glob.escape(FOLDER), "_node-*" + glob.escape(file[file.index("-torch"):]))):
            if older != file:
                os.unlink(older)
    except OSError as error:
        print(f"te-fl: {error}", file=sys.stderr)
        return 1
    finally:
        if os.path.exists(trial):
            os.unlink(trial)
    tried = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True,
                           env={**os.environ, "TE_FL_TORCH_NODE": "1"})
    if tried.returncode != 0:
        os.unlink(file)
        print(f"{tried.stderr}\nte-fl: the node does not work and was removed; te_fl.pytorch goes on with the one in Python", file=sys.stderr)
        return 1
    print(f"{file}: te_fl.pytorch takes it from its next import on (TE_FL_TORCH_NODE=0: not)")
    return 0
