"""Tests te_fl's type stubs: signatures of ops against the op specification, annotations against the objects."""

import ast
import importlib.util
import inspect
import os
import pathlib
import pydoc
import re
import struct
import subprocess
import sys
import tempfile
import typing
import unittest

import te_fl
from te_fl import _native

PACKAGE = pathlib.Path(os.path.abspath(te_fl.__file__)).parent
TENSOR, LIST, SAVED, INTS, COMMUNICATOR = 0, 1, 8, 9, 10
SCALARS = {2: "bool", 3: "int", 4: "int", 5: "float", 6: "float", 7: "Union[int, str]"}
OBJECTS = {TENSOR: "Tensor", LIST: "Sequence[Tensor]", SAVED: "Saved", INTS: "Sequence[int]", COMMUNICATOR: "Communicator"}


def single(value, schema, name):
    """Rounds a default to F32, as the op stores it: 1e-5 is not exact there."""
    f32 = any(a["name"] == name and a["type"] == 5 for a in schema["args"])
    return struct.unpack("f", struct.pack("f", value))[0] if f32 else value


class Ops(unittest.TestCase):
    stubs = {f.name: f for f in ast.parse((PACKAGE / "ops.pyi").read_text()).body if isinstance(f, ast.FunctionDef)}

    def test_every_op_has_a_stub_and_no_other(self):
        self.assertEqual(sorted(self.stubs), sorted(name for name in _native.op_names() if "::" not in name))

    def test_every_signature(self):
        for name, stub in self.stubs.items():
            with self.subTest(op=name):
                schema = te_fl.schema(name)
                expected = {}
                for a in schema["args"]:
                    if a["type"] in SCALARS:
                        expected[a["name"]] = (SCALARS[a["type"]], a["default"])
                    elif a["allocated"]:
                        expected[a["name"]] = ("Output", None)
                    elif a["optional"]:
                        expected[a["name"]] = (f"Optional[{OBJECTS[a['type']]}]", None)
                    else:
                        expected[a["name"]] = (OBJECTS[a["type"]], ...)
                if schema["random"]:
                    expected.update(seed=("Union[int, _Plain]", 0), offset=("int", 0))
                expected["stream"] = ("Any", None)
                declared = {a.arg: (ast.unparse(a.annotation), ... if d is None else single(ast.literal_eval(d), schema, a.arg))
                            for a, d in zip(stub.args.kwonlyargs, stub.args.kw_defaults)}
                self.assertEqual(declared, expected)
                self.assertEqual((stub.args.args, stub.args.vararg, stub.args.kwarg, ast.unparse(stub.returns)),
                                 ([], None, None, "Any" if any(a["allocated"] for a in schema["args"]) else "None"))

    def test_inspect_and_help_say_the_same(self):
        for name, stub in self.stubs.items():
            with self.subTest(op=name):
                shown = inspect.signature(getattr(te_fl.ops, name)).parameters.values()
                declared = [(a.arg, inspect.Parameter.empty if d is None and not ast.unparse(a.annotation).startswith("Optional")
                             else ast.literal_eval(d)) for a, d in zip(stub.args.kwonlyargs, stub.args.kw_defaults)]
                self.assertEqual([(p.name, p.default) for p in shown], declared)
                self.assertTrue(all(p.kind is p.KEYWORD_ONLY for p in shown))
                words, of_stub = (" ".join(text.split()) for text in (getattr(te_fl.ops, name).__doc__, ast.get_docstring(stub)))
                self.assertTrue(words.startswith(of_stub), (words, of_stub))
                self.assertEqual(getattr(te_fl.ops, name).__name__, name)
        page = pydoc.render_doc(te_fl.ops.rmsnorm_fwd, renderer=pydoc.plaintext)
        for part in ("rmsnorm_fwd(*, x, gamma, z=None, rsigma=None, epsilon=1e-05,", "    gamma: Tensor [H]\n", "    rsigma: Tensor [@...], written\n", "Raises:"):
            self.assertIn(part, page)

    def test_its_names_exist(self):
        tree = ast.parse((PACKAGE / "ops.pyi").read_text())
        known = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        known |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
        known |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.assertEqual(used - known - {"int", "float", "bool", "str", "property"}, set())
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "te_fl":
                for alias in node.names:
                    self.assertTrue(hasattr(te_fl, alias.name), alias.name)


class Package(unittest.TestCase):
    def functions(self):
        for name in te_fl.__all__:
            thing = getattr(te_fl, name)
            if inspect.isfunction(thing):
                yield name, thing
            elif inspect.isclass(thing) and thing.__module__.startswith("te_fl") and thing is not te_fl.LentTensor:
                for member, value in vars(thing).items():
                    value = getattr(value, "__func__", value)
                    value = value.fget if isinstance(value, property) else value
                    written = inspect.isfunction(value) and value.__module__.startswith("te_fl") and "<string>" not in value.__code__.co_filename
                    if written and (not member.startswith("_") or member == "__init__"):
                        yield f"{name}.{member}", value

    def test_every_public_name_is_there(self):
        for name in te_fl.__all__:
            self.assertTrue(hasattr(te_fl, name), name)
        self.assertTrue((PACKAGE / "py.typed").exists())

    def test_every_public_function_says_what_it_takes_and_returns(self):
        seen = 0
        for name, function in self.functions():
            with self.subTest(name=name):
                hints = typing.get_type_hints(function)
                parameters = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
                self.assertEqual([p for p in parameters if p not in hints], [])
                self.assertTrue("return" in hints or name.endswith(".__init__"))
                seen += 1
        self.assertGreater(seen, 20)

    def test_results_are_of_the_declared_type(self):
        for name in ("info", "usage", "verify_counts", "policy_text", "reset_usage", "write_trace"):
            function = getattr(te_fl, name)
            declared = typing.get_type_hints(function)["return"]
            self.assertIsInstance(function(), typing.get_origin(declared) or declared, name)

    def test_the_fields_of_an_implementation_are_of_their_types(self):
        impl = te_fl.OpImpl("relu", "vendor.x", te_fl.BackendImplKind.VENDOR, print, "acme")
        for name, declared in typing.get_type_hints(te_fl.OpImpl).items():
            value, kinds = getattr(impl, name), typing.get_args(declared) if typing.get_origin(declared) is typing.Union else (declared,)
            self.assertTrue(any(isinstance(value, typing.get_origin(k) or k) for k in kinds), name)

    def test_the_stub_of_lent_tensors(self):
        tree = ast.parse((PACKAGE / "_native.pyi").read_text())
        stub, = [c for c in tree.body if isinstance(c, ast.ClassDef)]
        declared = {f.name for f in stub.body if isinstance(f, ast.FunctionDef)} - {"__buffer__"}
        own = {name for name in vars(te_fl.LentTensor) if not name.startswith("__") or name.startswith("__dlpack")}
        self.assertEqual(declared, own)
        with self.assertRaises(TypeError):
            te_fl.LentTensor()


class Checkers(unittest.TestCase):
    """Runs type checkers on a program that uses te-fl correctly, and on one that does not."""

    RIGHT = """
import jax.numpy as jnp
import numpy as np
import torch

import te_fl
import te_fl.jax as te_jax
import te_fl.pytorch as te
from te_fl.common import recipe

layer = te.Linear(8, 8, bias=False)
with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
    layer(torch.zeros(2, 8))
with te_jax.autocast(enabled=True):
    pass
t = torch.zeros(2, 8)
te_fl.ops.gelu(input=t, output=t)
a = np.zeros((2, 8), np.float32)
te_fl.ops.gelu(input=a, output=a)
j = jnp.zeros((2, 8))
te_fl.ops.gelu(input=j, output=j)
te_fl.ops.dequantize(input=te_fl.Quantized(t, scale_inv=t), output=a)
te_fl.OpRegistry().list_operators()
te.InferenceParams(max_batch_size=2, max_sequence_length=32)
te.optimizers.FusedAdam(layer.parameters(), lr=1e-3, adam_w_mode=True)
with te_fl.policy(prefer="vendor", per_op={"gelu": ["reference"]}):
    pass
"""
    WRONG = """
import te_fl
import te_fl.pytorch as te

te_fl.ops.gelu(input=3, output=te_fl.Quantized(None))
te_fl.ops.gelu(inputs=te_fl.Quantized(None), output=te_fl.Quantized(None))
te.Linear(8, 8, biass=False)
te.autocast(recpie=None)
te.InferenceParams(max_batchsize=2, max_sequence_length=32)
te.optimizers.FusedAdam([], adam_w=True)
te.optimizers.FusedAdam([], capturable="yes")
te_fl.policy(prefer="vendors")
te_fl.policy(stritc=True)
te.GroupedLinear(2, 8, 8, biass=False)
"""
    LINES = [*range(5, 15)]  # lines of WRONG with wrong calls

    def check(self, *command):
        """Runs a checker on both programs in a folder of their own; it must report exactly the wrong lines."""
        with tempfile.TemporaryDirectory() as folder:
            for name, program in (("right", self.RIGHT), ("wrong", self.WRONG)):
                pathlib.Path(folder, f"{name}.py").write_text(program)
            pathlib.Path(folder, "mypy.ini").write_text(self.MYPY)
            paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
            done = subprocess.run([sys.executable, "-m", *command, "right.py", "wrong.py"], cwd=folder, capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        message = done.stdout + done.stderr
        found = {(name, int(line)) for name, line in re.findall(r"(right|wrong)\.py:(\d+)(?::\d+)?\s*[:-] error", message)}
        self.assertEqual(found, {("wrong", line) for line in self.LINES}, message)

    # mypy needs half a minute to read PyTorch and JAX (pyright three seconds), so it checks only te-fl's own files and NumPy.
    MYPY = """
[mypy]
strict = True
disable_error_code = no-untyped-call
[mypy-torch.*,jax.*,flax.*]
follow_imports = skip
ignore_missing_imports = True
[mypy-te_fl.*]
ignore_errors = True
"""

    @unittest.skipUnless(all(importlib.util.find_spec(name) for name in ("mypy", "numpy", "torch", "jax")), "needs mypy, NumPy, PyTorch and JAX")
    def test_mypy(self):
        self.check("mypy", "--config-file=mypy.ini", "--cache-dir=/dev/null")

    @unittest.skipUnless(all(importlib.util.find_spec(name) for name in ("basedpyright", "numpy", "torch", "jax")),
                         "needs basedpyright, NumPy, PyTorch and JAX")
    def test_pyright(self):
        self.check("basedpyright", "--level=error", f"--pythonpath={sys.executable}")


if __name__ == "__main__":
    unittest.main()
