"""Tests the ways to make NVIDIA's package compute with te-fl, each in a process of its own: by a call, by TE_FL_INSIDE_TRANSFORMER_ENGINE when the
interpreter starts, and by the package's own NVTE_PLUGIN. Also tests the refusals."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from forkserver import PYTHON

ROOT = pathlib.Path(__file__).resolve().parents[2]
BESIDE = os.path.join(sys.prefix, "inside")
FOUND = os.path.isdir(BESIDE) or importlib.util.find_spec("transformer_engine") is not None
for needed in ("torch", "pydantic", "onnxscript"):
    if importlib.util.find_spec(needed) is None:
        raise unittest.SkipTest(f"{needed} is not installed (tests/python/requirements.txt)")
if not FOUND:
    raise unittest.SkipTest("transformer_engine is not installed (tests/python/requirements-inside.txt)")

TRAIN = """
import torch, transformer_engine.pytorch as te
layer = te.Linear(32, 32)
layer(torch.randn(16, 32, device="cuda")).sum().backward()
import te_fl, transformer_engine_torch
print("run by", sorted({u["impl_id"] for u in te_fl.usage()}), transformer_engine_torch.__name__)
"""
# The steps that the package performs for NVTE_PLUGIN after it has loaded its extension, which needs NVIDIA's libraries
# (transformer_engine/common/__init__.py).
PLUGIN = """
import importlib, sys, types, warnings
extension = types.ModuleType("transformer_engine_torch")
sys.modules["transformer_engine_torch"] = sys.modules["transformer_engine_torch_nv"] = extension
try:
    importlib.import_module("te_fl.transformer_engine_plugin").load_plugins()
except Exception as error:
    sys.modules["transformer_engine_torch"] = extension
    print("kept:", error)
print(sys.modules["transformer_engine_torch"].__name__)
"""


def run(program, site=None, python=PYTHON, **variables):
    """Runs a program. site: a folder used as site-packages. python: the command line, which has PyTorch imported already unless it is sys.executable
    alone."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NVTE_", "TE_FL_"))}
    environment.update({k: v for k, v in variables.items() if v is not None})
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (site, BESIDE, os.environ.get("PYTHONPATH", "")) if p)
    if site:
        program = f"import site; site.addsitedir({site!r})\n{program}"
    program = f"import warnings; warnings.simplefilter('ignore')\n{program}"
    return subprocess.run([*python, "-c", program], env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT / "tests")


class Ways(unittest.TestCase):
    def prints(self, result, *lines):
        self.assertEqual(result.returncode, 0, result.stderr)
        for line in lines:
            self.assertIn(line, result.stdout, result.stderr)

    def fails(self, result, *words):
        self.assertNotEqual(result.returncode, 0, result.stdout)
        for word in words:
            self.assertIn(word, result.stderr)

    def test_call(self):
        served = "run by ['default.cpu'] te_fl.transformer_engine_torch"
        result = run("import te_fl; te_fl.inside_transformer_engine(device='cpu')" + TRAIN, python=[sys.executable])
        self.prints(result, served)
        self.assertIn("te-fl answers for CUDA by the host", result.stderr)
        self.prints(run("import torch, te_fl; te_fl.inside_transformer_engine('cpu'); te_fl.inside_transformer_engine('cpu')" + TRAIN), served)

    def test_variable(self):
        with tempfile.TemporaryDirectory() as site:
            pathlib.Path(site, "te_fl.pth").write_text((ROOT / "python/te_fl_as_transformer_engine.pth").read_text())
            self.prints(run(TRAIN, site, [sys.executable], TE_FL_INSIDE_TRANSFORMER_ENGINE="cpu"), "run by ['default.cpu'] te_fl.transformer_engine_torch")
            result = run("import sys; print('te_fl' in sys.modules)", site, [sys.executable], TE_FL_INSIDE_TRANSFORMER_ENGINE="0")
            self.prints(result, "False")
            result = run("import te_fl.inside; print(te_fl.inside.started())", site, [sys.executable], TE_FL_INSIDE_TRANSFORMER_ENGINE="1")
            self.prints(result, "True")
            result = run("import transformer_engine", site, TE_FL_INSIDE_TRANSFORMER_ENGINE="musa:0")
            self.assertIn("TE_FL_INSIDE_TRANSFORMER_ENGINE is 'musa:0'; it is 1, cpu, the type of another vendor's device, such as musa, or 0", result.stderr)
            self.fails(result, "TE_FL_INSIDE_TRANSFORMER_ENGINE")
            self.fails(run("import torch", site, [sys.executable], TE_FL_INSIDE_TRANSFORMER_ENGINE="acme"), "device is 'acme', and PyTorch's accelerator is")

    def test_plugin(self):
        self.prints(run(PLUGIN), "te_fl.transformer_engine_torch")
        both = "import te_fl; te_fl.inside_transformer_engine()\n" + PLUGIN
        self.prints(run(both), "kept: FAILED_PRECONDITION: NVTE_PLUGIN: te-fl is inside this process already", "transformer_engine_torch\n")
        self.fails(run(both, TE_FL_STRICT="1"), "TE_FL_STRICT forbids NVIDIA's extension instead", "use one way")
        self.fails(run("import te_fl; te_fl.inside_transformer_engine()", NVTE_PLUGIN="te_fl.transformer_engine_plugin"), "NVTE_PLUGIN brings te-fl in")

    def test_refused(self):
        self.fails(run("import te_fl; te_fl.as_transformer_engine(); te_fl.inside_transformer_engine()"), "stands for te-fl", "use one of the two ways")
        for device in ("cuda", "musa:1"):
            self.fails(run(f"import te_fl; te_fl.inside_transformer_engine({device!r})"), f"device is {device!r}; it is 'cpu', the type of another vendor's device")
        self.fails(run("import te_fl; te_fl.inside_transformer_engine(); te_fl.inside_transformer_engine('cpu')"), "a process has one")
        self.fails(run("import sys, types; sys.modules['transformer_engine'] = types.ModuleType('transformer_engine')\n"
                       "import te_fl; te_fl.inside_transformer_engine()"), "was imported before", "call this first")
        self.fails(run("import te_fl; te_fl.inside_transformer_engine()\nimport te_fl.inside.package as p, importlib.metadata as m\n"
                       "m.version = lambda name: '2.9.0'\nimport transformer_engine.pytorch"), "2.9.0 is older than 2.14")
        self.fails(run("import te_fl; te_fl.inside_transformer_engine('cpu')\nimport transformer_engine.jax"), "use te_fl.jax")

    def test_document(self):
        page = (ROOT / "docs/inside-transformer-engine.md").read_text()
        program = page.split("```python\n")[1].split("```")[0]
        self.prints(run(program), "fused_attn_fwd", "default.cpu")
        self.assertIn("pip install --no-deps " + (ROOT / "tests/python/requirements-inside.txt").read_text().split()[-1], page)

    def test_names(self):
        """te-fl's module has every name of NVIDIA's extension module; a name that te-fl does not support raises an error with the reason."""
        import json
        names = json.loads((ROOT / "tests/python/transformer_engine_torch_names.json").read_text())
        result = run("import te_fl.transformer_engine_torch as t, te_fl.transformer_engine_torch.absent as a, json, sys\n"
                     f"names = {names!r}\nprint([n for n in names if not hasattr(t, n)])\n"
                     "for n in a.REASONS:\n    try:\n        getattr(t, n)(1, x=2)\n        print('not refused', n)\n"
                     "    except t.absent.Unsupported as e:\n        assert n in str(e) and a.REASONS[n] in str(e)\n")
        self.prints(result, "[]\n")
        self.assertNotIn("not refused", result.stdout)


if __name__ == "__main__":
    unittest.main()
