"""Tests that each name of Transformer Engine that te-fl supports exists, with Transformer Engine's parameters and defaults."""

import ast
import importlib
import inspect
import json
import os
import pathlib
import subprocess
import sys
import unittest

from te_fl.compat import known_names, table


ROOT = pathlib.Path(__file__).resolve().parents[2]
FACTS = json.loads((ROOT / "tests/python/transformer_engine_facts.json").read_text())
KINDS = {inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional", inspect.Parameter.POSITIONAL_ONLY: "positional",
         inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.KEYWORD_ONLY: "keyword", inspect.Parameter.VAR_KEYWORD: "**"}
# Facts about Transformer Engine's internals, which te-fl's classes need not reproduce.
METHODS = ("__init__", "forward", "step", "zero_grad")
MACHINERY = ("tex.", "CPStrategy.")


class Any:
    """Stands for a default that is an internal object of Transformer Engine; equal to every value of te-fl's."""

    def __eq__(self, other):
        return True


ANY = Any()


def has(module):
    try:
        importlib.import_module(module)
    except ImportError as error:
        if not error.name or error.name.split(".")[0] == "te_fl":
            raise
        return False
    return True


def served():
    """Yields (Transformer Engine's qualified name, te-fl's public module, the name there, te-fl's object) for the frameworks that this interpreter
    has."""
    for qualified in FACTS:
        module, _, name = qualified.rpartition(".")
        home = table.home(module, name)
        if has(home):
            yield qualified, importlib.import_module(home), home, name


def parameters(function):
    """Lists parameters as tools/transformer_engine_names.py writes them, with values for defaults."""
    rows = [(p.name, p.default, KINDS[p.kind]) for p in inspect.signature(function).parameters.values()]
    return [row for i, row in enumerate(rows) if not (i == 0 and row[0] in ("self", "cls", "ctx"))]


def default(text, module):
    """Evaluates a default's text in te-fl's module that has the name."""
    if text is None:
        return inspect.Parameter.empty
    if any(part in text for part in MACHINERY):
        return ANY
    return eval(text, {"os": os, **{n: importlib.import_module(n) for n in ("torch", "jax") if has(n)}, **vars(module)})


def literal(text):
    """Returns True if a default is written as a literal. Other defaults of Flax modules are functions, which cannot be compared."""
    try:
        ast.literal_eval(text)
        return True
    except (ValueError, TypeError, SyntaxError):
        return False


class Names(unittest.TestCase):
    def test_every_supported_name_is_there(self):
        for home, names in table.SERVED.items():
            if names and has(home):
                module = importlib.import_module(home)
                for name in names.split():
                    with self.subTest(name=f"{home}.{name}"):
                        self.assertTrue(hasattr(module, name))

    def test_every_supported_name_is_one_of_transformer_engines(self):
        known = {(module, name) for module, names in known_names.NAMES.items() for name in names.split()}
        homes = {(table.home(module, name), name) for module, name in known}
        for home, names in table.SERVED.items():
            for name in names.split():
                self.assertIn((home, name), homes)

    def test_parameters_and_defaults(self):
        checked = 0
        for qualified, module, home, name in served():
            own, facts = getattr(module, name), FACTS[qualified]
            if f"{home}.{name}" in table.MADE_BY:
                continue
            if "fields" in facts:
                with self.subTest(name=qualified):
                    mine = inspect.signature(own).parameters
                    self.assertEqual([n for n, _, _ in facts["fields"] if n not in mine], [])
                    for n, text, _ in facts["fields"]:
                        if literal(text):
                            self.assertEqual(mine[n].default, ast.literal_eval(text), n)
                    checked += 1
                continue
            pairs = [(own, facts["parameters"])] if "parameters" in facts else \
                [(own if method == "__init__" else getattr(own, method), rows) for method, rows in facts["methods"].items()
                 if method in METHODS]
            for function, rows in pairs:
                with self.subTest(name=qualified, function=getattr(function, "__qualname__", name)):
                    besides = ("device", *table.MORE.get(f"{home}.{name}", ()))
                    mine = [row for row in parameters(function) if row[0] not in besides]
                    theirs = [(n, default(text, module), kind) for n, text, kind in rows if n != "device"]
                    self.assertEqual(mine, theirs)
                    checked += 1
        self.assertGreaterEqual(checked, 8)  # recipes are always checked, since they need no framework

    def test_what_partly_supported_names_refuse(self):
        checked = set()
        for qualified, arguments in table.PARTLY.items():
            method = next((m for m in ("forward", "__call__") if qualified.endswith("." + m)), None)
            home, _, name = (qualified.removesuffix("." + method) if method else qualified).rpartition(".")
            if not has(home):
                continue
            checked.add(name)
            framework = importlib.import_module(home.split(".")[1].replace("pytorch", "torch"))
            own = getattr(importlib.import_module(home), name)
            known = inspect.signature(getattr(own, method) if method else own).parameters
            for argument, value in arguments.items():
                with self.subTest(name=qualified, argument=argument):
                    self.assertTrue(argument in known or any(p.kind is p.VAR_KEYWORD for p in known.values()))
                    if isinstance(value, str) and value.startswith("torch."):
                        value = getattr(framework, value.removeprefix("torch."))
                    with self.assertRaisesRegex(NotImplementedError, argument):  # te_fl.errors.Unsupported is a NotImplementedError
                        use(framework, own, name, {} if method else {argument: value}, {argument: value} if method else {})
        frameworks = {"pytorch", "jax"} if has("torch") and has("flax") else set()
        self.assertTrue(not frameworks or checked == set(SAMPLES), checked ^ set(SAMPLES))

    @unittest.skipUnless(has("torch"), "needs PyTorch")
    def test_members(self):
        """Objects have the members of Transformer Engine's objects, except those that the table lists with a reason; plain attributes can be set."""
        import torch
        listed, met = {name for names, _ in table.LACKING for name in names.split()}, set()
        for qualified, module, home, name in served():
            members = FACTS[qualified].get("members", {})
            if not members or name in BASES:
                continue
            sample = MADE.get(name, lambda torch: ())(torch)
            made = sample if not isinstance(sample, (tuple, dict)) else getattr(module, name)(**sample) if isinstance(sample, dict) else getattr(module, name)(*sample)
            lacking = {n for n in members if not hasattr(made, n)}
            met |= lacking
            fixed = {n for n, kind in members.items() if kind == "plain" and isinstance(getattr(type(made), n, None), property)
                     and getattr(type(made), n).fset is None}
            with self.subTest(name=qualified):
                self.assertEqual((sorted(lacking - listed), sorted(fixed)), ([], []))
        self.assertEqual(sorted(listed - met), [])

    def test_the_page_is_as_the_table_says(self):
        subprocess.run([sys.executable, ROOT / "tools/transformer_engine_names.py", "--check"], check=True)


# Base classes, and classes whose objects other functions make.
BASES = ("DType", "FusibleOperation", "KVCacheManager", "NonPagedKVCacheManager", "OperationContext", "PagedKVCacheManager", "QuantizedTensor", "Quantizer",
         "SplitAlongDim", "TransformerEngineBaseModule", "activation_recompute_forward")


def codes(torch):
    import te_fl.pytorch as te
    with te.quantized_model_init():
        return te.Linear(16, 16, device="cpu").weight


# Constructor arguments for an object of the class, or the object itself; classes without an entry are not constructed.
MADE = {
    "BasicLinear": lambda torch: (16, 16), "Bias": lambda torch: (16,), "ConstantScale": lambda torch: (2.0,), "DotProductAttention": lambda torch: (2, 16),
    "Dropout": lambda torch: (0.5,), "Float8BlockQuantizer": lambda torch: {"fp8_dtype": 7, "rowwise": True, "columnwise": True},
    "Float8CurrentScalingQuantizer": lambda torch: {"fp8_dtype": 7, "device": "cpu"},
    "Float8Quantizer": lambda torch: {"fp8_dtype": 7, "scale": torch.ones(1), "amax": torch.zeros(1)}, "Float8Tensor": codes,
    "IdentityQuantizer": lambda torch: {}, "MXFP8Quantizer": lambda torch: {"fp8_dtype": 7}, "NVFP4Quantizer": lambda torch: {},
    "HybridQuantizer": lambda torch: hybrid(),
    "Fp8Padding": lambda torch: (2,), "Fp8Unpadding": lambda torch: (2,), "FP8GlobalStateManager": lambda torch: global_state(),
    "FusedAdam": lambda torch: ([torch.nn.Parameter(torch.zeros(2))],), "FusedOperation": lambda torch: ([torch.nn.Identity()],),
    "FusedSGD": lambda torch: ([torch.nn.Parameter(torch.zeros(2))], 0.1), "FusedScaleMaskSoftmax": lambda torch: (print,),
    "GroupedLinear": lambda torch: (2, 16, 16), "InferenceParams": lambda torch: (2, 32, 2, 16, torch.float32), "LayerNorm": lambda torch: (16,),
    "LayerNormLinear": lambda torch: (16, 16), "LayerNormMLP": lambda torch: (16, 32), "Linear": lambda torch: (16, 16),
    "ManualOffloadSynchronizer": lambda torch: (2,), "MultiTensorApply": lambda torch: (2048,), "MultiheadAttention": lambda torch: (32, 2),
    "RMSNorm": lambda torch: (16,), "Reshape": lambda torch: ((4, 4),), "RotaryPositionEmbedding": lambda torch: (16,),
    "ScaledSiTUGLU": lambda torch: {"beta1": 1.0, "beta2": 1.0}, "ScaledTanhSReLU": lambda torch: {"tanh_clamp_scale": 1.0},
    "SiTUGLU": lambda torch: {"beta1": 1.0, "beta2": 1.0}, "TransformerLayer": lambda torch: (32, 64, 2),
}


def hybrid():
    from te_fl.pytorch.fp8.block_quantizers import IdentityQuantizer
    return {"rowwise_quantizer": IdentityQuantizer(), "columnwise_quantizer": IdentityQuantizer()}


def global_state():
    from te_fl.pytorch.fp8.global_state import FP8GlobalStateManager
    return FP8GlobalStateManager


# Arguments that a name needs besides the refused one, positional or by name, and the arguments of a module's forward.
SAMPLES = {
    "IdentityQuantizer": lambda torch: {}, "MXFP8Quantizer": lambda torch: {"fp8_dtype": 7}, "NVFP4Quantizer": lambda torch: {},
    "Float8BlockQuantizer": lambda torch: {"fp8_dtype": 7, "rowwise": True, "columnwise": True},
    "Float8CurrentScalingQuantizer": lambda torch: {"fp8_dtype": 7},
    "Float8Quantizer": lambda torch: {"fp8_dtype": 7, "scale": torch.ones(1), "amax": torch.zeros(1)},
    "Quantizer": lambda torch: {"rowwise": True, "columnwise": True},
    **{name: lambda torch: () for name in
       "AllReduce ScaledSReLU ScaledSwiGLU ScaledSiTUGLU ScaledClampedQGeGLU".split()},
    "ScaledTanhSReLU": lambda torch: {"tanh_clamp_scale": 1.0},
    "BasicLinear": lambda torch: (16, 16),
    "DotProductAttention": lambda lib: (2, 16) if lib.__name__ == "torch" else (16, 2),
    "FusedAdam": lambda torch: ([torch.nn.Parameter(torch.zeros(2))],),
    "FusedSGD": lambda torch: ([torch.nn.Parameter(torch.zeros(2))], 0.1),
    "FusedScaleMaskSoftmax": lambda torch: (print,),
    "GroupedLinear": lambda torch: (2, 16, 16),
    "LayerNormDenseGeneral": lambda jax: (16,),
    "LayerNorm": lambda torch: (16,),
    "LayerNormLinear": lambda torch: (16, 16),
    "LayerNormMLP": lambda lib: (16, 32) if lib.__name__ == "torch" else (32,),
    "Linear": lambda torch: (16, 16),
    "MultiHeadAttention": lambda jax: (16, 2),
    "RMSNorm": lambda torch: (16,),
    "TransformerLayer": lambda jax: (32, 64, 2),
    "fused_topk_with_score_function": lambda torch: (torch.zeros(2, 4), 1, False, None, None, None, "sigmoid", None),
    "general_gemm": lambda torch: (torch.zeros(4, 8), torch.zeros(2, 8)),
    "make_graphed_callables": lambda torch: (torch.nn.Linear(2, 2), (torch.zeros(1, 2),)),
}
INPUTS = {
    "DotProductAttention": [(4, 1, 2, 16)] * 3,
    "LayerNormDenseGeneral": [(4, 16)],
    "LayerNormLinear": [(16, 16)],
    "LayerNormMLP": [(4, 16)],
    "Linear": [(16, 16)],
    "MultiHeadAttention": [(4, 1, 32)] * 2,
    "TransformerLayer": [(4, 1, 32)],
}


def use(framework, own, name, making, calling):
    """Constructs an object with the arguments and, if it is a module, calls it; Flax modules check both sets of arguments only when called."""
    sample = SAMPLES[name](framework)
    made = own(**{**sample, **making}) if isinstance(sample, dict) else own(*sample, **making)
    if framework.__name__ == "jax":
        import jax.numpy as jnp
        keys = {name: framework.random.key(0) for name in ("params", "dropout")}
        made.init(keys, *(jnp.zeros(s) for s in INPUTS[name]), **calling)
    elif calling:
        device = "cuda" if framework.cuda.is_available() else "cpu"
        made(*(framework.zeros(s, device=device) for s in INPUTS[name]), **calling)

