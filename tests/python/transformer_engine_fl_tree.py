"""usage: transformer_engine_fl_tree.py, with TRANSFORMER_ENGINE_FL_TREE=FOLDER. Runs the backends and the test suites of a checkout of TransformerEngine-FL on te-fl, unedited.

Every vendor's extension module is replaced by a stand-in that computes with te-fl's functions; FlagGems is replaced by an empty module, if it is not
installed, so that its backend registers but does not compute. Prints, for each backend, how many of the functions in its register_ops.py were
registered, and for each test suite how many of its checks passed. Exits 77, which means skipped, without TRANSFORMER_ENGINE_FL_TREE.
"""

import ast
import contextlib
import io
import importlib
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import types
import unittest

TREE = os.environ.get("TRANSFORMER_ENGINE_FL_TREE")
if not TREE:
    print("skipped: TRANSFORMER_ENGINE_FL_TREE names no checkout of TransformerEngine-FL")
    sys.exit(77)
TREE = pathlib.Path(TREE).resolve()
sys.path.insert(0, str(TREE))

import torch  # noqa: E402

import te_fl  # noqa: E402
from te_fl import tex_form, transformer_engine_torch  # noqa: E402

te_fl.as_transformer_engine()
BACKENDS = TREE / "transformer_engine/plugin/core/backends"
# An extension module in C that has the attributes of the Python module stand_in. Hygon's backend loads its extension from a file of that name.
HYGON = """#include <Python.h>
static int execute(PyObject* module) {
  PyObject* made = PyImport_ImportModule("stand_in");
  int status = made == NULL ? -1 : PyDict_Update(PyModule_GetDict(module), PyModule_GetDict(made));
  Py_XDECREF(made);
  return status;
}
static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "transformer_engine_torch_hygon", NULL, 0, NULL, slots, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_transformer_engine_torch_hygon(void) { return PyModuleDef_Init(&def); }
"""


class StandIn(types.ModuleType):
    """A vendor's extension: te-fl's functions, run by the reference implementations."""

    def __getattr__(self, name):
        own = tex_form.own_function(name)
        if own is None:
            return getattr(transformer_engine_torch, name)

        def fn(*arguments, **options):
            with te_fl.policy(prefer="reference"):
                return own(*arguments, **options)
        return fn


# Backends that register but are left out of the test suites, with the reason.
_CANNOT_COMPUTE = {"vendor.enflame": "its _enflame_libs_loaded is never set, so that every function raises NameError, on TransformerEngine-FL too"}


# Kunlunxin's extension takes no quantiser and no dtype, and returns no mean.
KUNLUNXIN = """from stand_in import *
import stand_in

def rmsnorm_fwd(input, weight, eps, sm_margin, zero_centered_gamma):
    result, _, statistics = stand_in.rmsnorm_fwd(input, weight, eps, None, None, {"float32": 4, "float16": 5, "bfloat16": 6}[str(input.dtype)[6:]],
                                                 sm_margin, zero_centered_gamma)
    return result, statistics
"""


def compile_library(source, target, *options):
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target), *options], input=source, text=True, check=True)


def provide_extensions(folder):
    """Makes what the backends look for: packages, libraries that load, extension modules, and devices."""
    sys.path.insert(0, str(folder))
    stand_in = sys.modules["stand_in"] = StandIn("stand_in")
    for name in dir(transformer_engine_torch):
        if not name.startswith("_"):
            setattr(stand_in, name, getattr(stand_in, name))
    for package, library in (("transformer_engine_metax", "libtransformer_engine.so"), ("transformer_engine_hygon", "libtransformer_engine.so"),
                             ("transformer_engine_iluvatar/libs", "libixte_common.so"), ("transformer_engine_klx_torch", "transformer_engine_klx.so"),
                             ("transformer_engine_musa", ""), ("nvidia", "libtransformer_engine.so")):
        (folder / package).mkdir(parents=True)
        (folder / package.split("/")[0] / "__init__.py").write_text(KUNLUNXIN if "klx" in package else "from stand_in import *\n")
        if library:
            compile_library("int te_fl_nothing;", folder / package / library)
    compile_library(HYGON, folder / "transformer_engine_hygon/transformer_engine_torch_hygon.so", f"-I{sysconfig.get_paths()['include']}")
    os.environ["TE_LIB_PATH"] = str(folder / "nvidia")
    for name in ("transformer_engine_torch_nv", "transformer_engine_torch_metax", "transformer_engine_iluvatar.pytorch.ixte_torch",
                 "transformer_engine_musa_torch", "torch_gcu", "torch_gcu.transfer_to_gcu", "migration.patches.transformer_engine.v2_9_0"):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            full = ".".join(parts[:i])
            if full not in sys.modules and not (folder / parts[0]).exists() or i > 1:
                sys.modules.setdefault(full, StandIn(full))
                if i > 1:
                    setattr(sys.modules[".".join(parts[:i - 1])] if ".".join(parts[:i - 1]) in sys.modules else importlib.import_module(parts[0]),
                            parts[i - 1], sys.modules[full])
    try:
        importlib.import_module("flag_gems")
    except Exception:
        sys.modules["flag_gems"] = types.ModuleType("flag_gems")
        _CANNOT_COMPUTE["default.flagos"] = "FlagGems is not installed"
    torch.cuda.is_available = lambda: True
    torch.musa = types.SimpleNamespace(is_available=lambda: True, Stream=torch.Stream)


def written(path):
    """The number of functions that a register_ops.py registers."""
    return sum(isinstance(node, ast.Call) and getattr(node.func, "id", "") == "OpImpl" for node in ast.walk(ast.parse(path.read_text())))


def register_backends():
    """Registers each backend; returns {name: (registered, written, error)}."""
    core = importlib.import_module("transformer_engine.plugin.core")
    registry = core.get_registry()
    counts = {}
    for path in sorted(BACKENDS.rglob("register_ops.py")):
        name = str(path.parent.relative_to(BACKENDS)).replace("/", ".")
        before, error = len(list(registry.registered())), ""
        try:
            importlib.import_module(f"transformer_engine.plugin.core.backends.{name}.register_ops").register_builtins(registry)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        made = [impl for impl in list(registry.registered())[before:] if isinstance(impl, core.OpImpl) and impl.impl_id != tex_form.OWN]
        counts[name] = len(made), written(path), error
    return counts


def run_suites():
    """Runs the test suites on the CPU; returns {name: (passed, failed, skipped, what failed)}."""
    sys.path.insert(0, str(TREE / "transformer_engine/plugin/tests"))
    counts = {}
    for module, name in (("test_activations", "ActivationTests"), ("test_normalization", "NormalizationTests"), ("test_operations", "OperationsTests"),
                         ("test_softmax", "SoftmaxTests"), ("test_optimizer", "OptimizerTests"), ("test_flash_attention", "FlashAttentionTests")):
        suite = getattr(importlib.import_module(module), name)(device="cpu")
        if module == "test_flash_attention":  # the others' class is that of flash-attn, or of a vendor's extension
            suite.backends = [name for name in suite.backends if name in ("reference", "kunlunxin", "te_fl")]
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            suite.run_all_tests()
        counts[module] = suite.passed, suite.failed, suite.skipped, [line.strip() for line in output.getvalue().splitlines() if "✗" in line]
    policy = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module("test_policy"))
    with contextlib.redirect_stdout(io.StringIO()):
        result = unittest.TestResult()
        policy.run(result)
    bad = [f"{test}: {text.splitlines()[-1]}" for test, text in result.failures + result.errors]
    counts["test_policy"] = result.testsRun - len(bad), len(bad), 0, bad
    return counts


def main():
    with tempfile.TemporaryDirectory() as folder:
        provide_extensions(pathlib.Path(folder))
        backends = register_backends()
        return report(backends)


def report(backends):
    for name, (registered, all_, error) in backends.items():
        print(f"{name:20} {registered:4} of {all_:4} functions registered  {error}")
    print(f"{'all':20} {sum(r for r, _, _ in backends.values()):4} of {sum(w for _, w, _ in backends.values()):4}")
    registry = importlib.import_module("transformer_engine.plugin.core").get_registry()
    for impl in list(registry.registered()):
        if impl.impl_id in _CANNOT_COMPUTE and isinstance(impl, tex_form.TexImpl):
            registry.unregister(impl.op_name, impl.impl_id)
    for impl_id, reason in _CANNOT_COMPUTE.items():
        print(f"{impl_id} is left out of the suites: {reason}")
    suites = run_suites()
    for name, (passed, failed, skipped, bad) in suites.items():
        print(f"{name:20} {passed:4} passed {failed:4} failed {skipped:4} skipped")
        for line in bad if os.environ.get("TRANSFORMER_ENGINE_FL_TREE_SAY") else bad[:3]:
            print(f"    {line[:300]}")
    print(f"{'all':20} {sum(p for p, _, _, _ in suites.values()):4} of {sum(p + f for p, f, _, _ in suites.values()):4} passed")
    return any(r != w for r, w, _ in backends.values())


if __name__ == "__main__":
    sys.exit(main())
