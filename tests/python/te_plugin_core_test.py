"""Tests functions with Transformer Engine's arguments as implementations of ops: TransformerEngine-FL's names (transformer_engine.plugin.core), a
vendor's package of the shape that its packages have, what te-fl does with functions that fail, and te_fl.pytorch on a vendor's functions."""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest

import torch

import te_fl
from forkserver import PYTHON
from te_fl import plugin_core, tex_form, transformer_engine_torch as tex
from te_fl.plugin_core import BackendImplKind, OpImpl, OpManager, OpRegistry, SelectionPolicy
from te_fl.transformer_engine_torch.enums import DType

VENDOR, REFERENCE, DEFAULT = BackendImplKind.VENDOR, BackendImplKind.REFERENCE, BackendImplKind.DEFAULT
NAMES = """BackendImplKind OpImpl match_token TEFLBackendBase TEFLModule get_tefl_module reset_tefl_module get_registry get_manager reset_registry Logger
    LoggerManager SelectionPolicy PolicyManager get_policy set_global_policy reset_global_policy policy_context policy_from_env get_policy_epoch
    bump_policy_epoch with_strict_mode with_preference with_allowed_vendors with_denied_vendors PREFER_DEFAULT PREFER_VENDOR PREFER_REFERENCE
    VALID_PREFER_VALUES OpManager get_default_manager reset_default_manager OpRegistry discover_plugin discover_from_entry_points
    discover_from_env_modules get_discovered_plugin clear_discovered_plugin PLUGIN_GROUP PLUGIN_MODULES_ENV""".split()


def rmsnorm(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    r = torch.rsqrt(input.float().square().mean(-1) + eps)
    return [(input.float() * r[..., None] * (weight.float() + zero_centered_gamma)).to(input.dtype), None, r.reshape(-1)]


X, GAMMA = torch.randn(4, 8), torch.rand(8)
RMSNORM = (X, GAMMA, 1e-5, None, None, DType.kFloat32, 0, False)


class Registered(unittest.TestCase):
    def setUp(self):
        te_fl.reset_usage()
        self.addCleanup(plugin_core.reset_default_manager)
        self.addCleanup(plugin_core.reset_global_policy)

    def add(self, name, fn, impl_id="vendor.acme", kind=VENDOR, vendor="ACME", **options):
        impl = OpImpl(name, impl_id, kind, fn, vendor=vendor, **options)
        plugin_core.get_registry().register_impl(impl)
        return impl

    def ran(self, name="rmsnorm_fwd"):
        return [(row["impl_id"], row["form"]) for row in te_fl.usage() if row["op"] == name]


class Form(Registered):
    def test_without_a_vendor_the_module_has_te_fl_s_functions(self):
        own = tex.rmsnorm_fwd
        self.assertEqual((own.__module__, type(own).__name__), ("te_fl.transformer_engine_torch.normalization", "function"))
        self.add("rmsnorm_fwd", rmsnorm)
        self.assertIsNot(tex.rmsnorm_fwd, own)
        self.assertIs(tex.layernorm_fwd.__module__, own.__module__)
        plugin_core.get_registry().unregister("rmsnorm_fwd", "vendor.acme")
        self.assertIs(tex.rmsnorm_fwd, own)

    def test_one_policy_for_both_forms(self):
        expected = tex.rmsnorm_fwd(*RMSNORM)
        self.add("rmsnorm_fwd", rmsnorm)
        z, _, rsigma = tex.rmsnorm_fwd(*RMSNORM)
        torch.testing.assert_close((z, rsigma), (expected[0], expected[2]))
        self.assertIn(("vendor.acme", "tex"), self.ran())
        for tokens, typed in ((["flagos"], False), (["vendor:acme"], True), (["impl:vendor.acme"], True), (["reference"], False)):
            te_fl.reset_usage()
            with self.subTest(tokens), te_fl.policy(per_op={"rmsnorm_fwd": tokens}):
                tex.rmsnorm_fwd(*RMSNORM)
                out, r = te_fl.ops.rmsnorm_fwd(x=X, gamma=GAMMA, epsilon=1e-5)
                torch.testing.assert_close(out, expected[0])
                self.assertEqual(("vendor.acme", "tex") in self.ran(), typed)
                self.assertEqual(("vendor.acme", "typed") in self.ran(), typed)
        with te_fl.policy(deny_vendors="acme"):
            self.assertEqual(te_fl.explain("rmsnorm_fwd", *RMSNORM)["impl_id"], tex_form.OWN)
        explained = te_fl.explain("rmsnorm_fwd")
        self.assertEqual((explained["op"], explained["tex"]["impl_id"], explained["tex"]["form"]), ("rmsnorm_fwd", "vendor.acme", "tex"))
        self.assertEqual(te_fl.explain("rmsnorm_fwd", *RMSNORM)["impl_id"], "vendor.acme")

    def test_names_that_transformer_engine_alone_has(self):
        with te_fl.policy(per_op="get_attention_backend=vendor:acme;get_cudnn_version=vendor"):
            pass
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "no op 'get_cudnn_versions'"):
            te_fl.policy(per_op="get_cudnn_versions=vendor")
        self.add("get_attention_backend", lambda attention_params=None: "acme's")
        self.add("get_cudnn_version", lambda: 7)
        self.assertEqual((tex.get_attention_backend(), tex.get_cudnn_version()), ("acme's", 7))
        self.add("create_comm_overlap", lambda *sizes: ("overlap", sizes))
        self.assertEqual(tex.CommOverlap(1, 2), ("overlap", (1, 2)))
        plugin_core.reset_default_manager()
        self.assertFalse(hasattr(tex, "get_attention_backend"))
        with self.assertRaisesRegex(te_fl.errors.Unsupported, "CommOverlap"):
            tex.CommOverlap(1, 2)

    def test_an_op_of_its_own(self):
        self.add("acme_op", lambda x: x + 1)
        self.add("acme_op", lambda x: -x, "reference.plain", REFERENCE, None)
        self.assertEqual(plugin_core.get_manager().call("acme_op", 41), 42)
        with te_fl.policy(per_op={"acme_op": "reference"}):
            self.assertEqual(te_fl.ops.acme_op(41), -41)

    def test_a_registry_of_the_program_s_own(self):
        registry = OpRegistry()
        registry.register_impl(OpImpl("rmsnorm_fwd", "vendor.mine", VENDOR, rmsnorm, vendor="mine", priority=200))
        manager = OpManager(registry)
        self.assertEqual(manager.get_selected_impl_id("rmsnorm_fwd"), "vendor.mine")
        self.assertIs(manager.resolve("rmsnorm_fwd"), rmsnorm)
        torch.testing.assert_close(manager.call("rmsnorm_fwd", *RMSNORM)[0], rmsnorm(*RMSNORM)[0])
        self.assertEqual([i.impl_id for i in manager.resolve_candidates("rmsnorm_fwd")], ["vendor.mine", "default.te_fl"])
        self.assertEqual(registry.list_operators(), ["rmsnorm_fwd"])
        self.assertEqual(set(registry.snapshot().impls_by_op), {"rmsnorm_fwd"})
        torch.testing.assert_close(manager.call("gelu", X, None), torch.nn.functional.gelu(X, approximate="tanh"))


class Failures(Registered):
    def test_the_next_runs_and_the_failure_is_remembered(self):
        calls = []

        def fails(*arguments):
            calls.append(1)
            raise RuntimeError("no kernel image")
        self.add("rmsnorm_fwd", fails)
        for _ in range(3):
            torch.testing.assert_close(tex.rmsnorm_fwd(*RMSNORM)[0], rmsnorm(*RMSNORM)[0])
        self.assertEqual((len(calls), self.ran()[0][0] != "vendor.acme"), (1, True))
        [explained] = [c["reason"] for c in te_fl.explain("rmsnorm_fwd", *RMSNORM)["candidates"] if c["impl_id"] == "vendor.acme"]
        self.assertIn("it failed before, with RuntimeError: no kernel image", explained)
        plugin_core.bump_policy_epoch()
        tex.rmsnorm_fwd(*RMSNORM)
        with te_fl.policy(prefer="vendor"):  # another policy
            tex.rmsnorm_fwd(*RMSNORM)
        self.assertEqual(len(calls), 3)
        with te_fl.policy(strict=True), self.assertRaisesRegex(te_fl.Error, "no kernel image") as raised:
            tex.rmsnorm_fwd(*RMSNORM)
        self.assertEqual(str(raised.exception.__cause__), "no kernel image")

    def test_a_call_that_nothing_can_run_is_not_remembered(self):
        self.add("rmsnorm_fwd", rmsnorm)
        with self.assertRaises(te_fl.Error):
            tex.rmsnorm_fwd(X, GAMMA[:3], *RMSNORM[2:])
        te_fl.reset_usage()
        tex.rmsnorm_fwd(*RMSNORM)
        self.assertEqual(self.ran(), [("vendor.acme", "tex")])

    def test_a_refusal_is_of_the_call(self):
        def of_two(input, *rest):
            if input.dim() != 2:
                raise NotImplementedError("rank 2 only")
            return rmsnorm(input, *rest)
        self.add("rmsnorm_fwd", of_two)
        tex.rmsnorm_fwd(X[None], *RMSNORM[1:])
        te_fl.reset_usage()
        tex.rmsnorm_fwd(*RMSNORM)
        self.assertEqual(self.ran(), [("vendor.acme", "tex")])

    def test_wrong_results(self):
        wrong = {"returned 2 results; it returns 3": lambda *a: rmsnorm(*a)[:2],
                 "returned float64; the call asks for float32": lambda *a: [rmsnorm(*a)[0].double(), None, rmsnorm(*a)[2]],
                 "returned a tensor on meta as result 2; the arguments are on cpu": lambda *a: [*rmsnorm(*a)[:2], rmsnorm(*a)[2].to("meta")]}
        for reason, fn in wrong.items():
            with self.subTest(reason):
                self.add("rmsnorm_fwd", fn)
                torch.testing.assert_close(tex.rmsnorm_fwd(*RMSNORM)[0], rmsnorm(*RMSNORM)[0])
                self.assertNotIn(("vendor.acme", "tex"), self.ran())
                with te_fl.policy(strict=True), self.assertRaisesRegex(te_fl.Error, reason):
                    tex.rmsnorm_fwd(*RMSNORM)
                plugin_core.reset_default_manager()
        for result in (None, "x", X.numpy()):
            self.add("gelu", lambda input, quantizer: result)
            torch.testing.assert_close(tex.gelu(X, None), torch.nn.functional.gelu(X, approximate="tanh"))
            plugin_core.reset_default_manager()
        self.add("gelu", lambda input, quantizer: [input])
        with te_fl.policy(strict=True), self.assertRaisesRegex(te_fl.Error, "gelu returned 1 results; it returns one tensor"):
            tex.gelu(X, None)

    def test_half_written_arguments(self):
        """No other implementation starts from values that a failed one has written."""
        def half(chunk_size, noop_flag, tensor_lists, scale):
            tensor_lists[1][0].fill_(7)
            raise RuntimeError("launch failed")
        self.add("multi_tensor_scale", half)
        out = [torch.zeros(3), torch.zeros(3)]
        with self.assertRaisesRegex(te_fl.errors.Internal, "may have written to its arguments already.*TE_FL_PER_OP=multi_tensor_scale=flagos"):
            tex.multi_tensor_scale(65536, torch.zeros(1, dtype=torch.int32), [[X[0][:3], X[1][:3]], out], 2.0)
        plugin_core.reset_default_manager()

        def lacking(*arguments):
            raise AttributeError("module 'acme_tex' has no attribute 'multi_tensor_scale'")
        self.add("multi_tensor_scale", lacking)
        tex.multi_tensor_scale(65536, torch.zeros(1, dtype=torch.int32), [[X[0][:3], X[1][:3]], out], 2.0)
        torch.testing.assert_close(out[0], 2 * X[0][:3])
        plugin_core.get_manager().call("multi_tensor_scale", chunk_size=65536, noop_flag=torch.zeros(1, dtype=torch.int32), tensor_lists=[[X[0]], [X[1].clone()]],
                                       scale=2.0)

    def test_a_supports_that_raises_or_refuses(self):
        for verdict, reason in ((lambda *arguments: 1 / 0, "its supports() failed with ZeroDivisionError"), (lambda *arguments: "not today", "not today")):
            self.add("gelu", lambda x, q: x * 0, supports=verdict)
            expected = torch.nn.functional.gelu(X, approximate="tanh")
            with te_fl.policy(prefer="vendor"):
                torch.testing.assert_close((tex.gelu(X, None), te_fl.ops.gelu(input=X)), (expected, expected))
            self.assertIn(reason, " ".join(c["reason"] for c in te_fl.explain("gelu", X, None)["candidates"]))
            plugin_core.reset_default_manager()

    def test_a_function_that_calls_its_own_op(self):
        """It gets the next implementation, in both forms, and is not remembered as failed."""
        self.add("gelu", lambda x, q: tex.gelu(x, q) + 1)
        expected = torch.nn.functional.gelu(X, approximate="tanh") + 1
        with te_fl.policy(prefer="vendor"):
            for _ in range(2):
                torch.testing.assert_close((tex.gelu(X, None), te_fl.ops.gelu(input=X)), (expected, expected))

    def test_arguments_of_another_version(self):
        """The package passes arguments by position, and Transformer Engine 2.17 dropped two at the front of this function."""
        def former(num_tokens, num_experts, routing_map, intermediate_output, grad_probs, grad_logits, topk, use_pre_softmax, scaling_factor, score_function):
            self.fail("called with arguments of another version")
        self.add("fused_topk_with_score_function_bwd", former)
        routing, kept, grad = torch.tensor([[True, False]]), torch.tensor([[0.5, 0.2]]), torch.ones(1, 2)
        out = torch.empty(1, 2)
        self.addCleanup(setattr, tex_form, "_calls_of_package", False)
        tex_form.serve_package()
        arguments = routing, kept, grad, out, 1, False, 1.0, "sigmoid", False, 0
        tex.fused_topk_with_score_function_bwd(*arguments)
        torch.testing.assert_close(out, torch.tensor([[0.25, 0.0]]))  # the derivative of the sigmoid
        [reason] = [c["reason"] for c in te_fl.explain("fused_topk_with_score_function_bwd", *arguments)["candidates"] if c["impl_id"] == "vendor.acme"]
        self.assertIn("its argument 3 is routing_map, which this version's package passes as 1", reason)
        self.add("gelu", lambda x, q: torch.nn.functional.gelu(x, approximate="tanh"))  # other names in the same order
        tex.gelu(X, None)
        self.assertIn(("vendor.acme", "tex"), self.ran("gelu"))

    def test_two_of_one_id(self):
        self.add("rmsnorm_fwd", rmsnorm)
        with self.assertRaisesRegex(ValueError, "vendor.acme.*is registered already"):
            self.add("rmsnorm_fwd", rmsnorm)
        with self.assertRaisesRegex(ValueError, "names its vendor"):
            OpImpl("rmsnorm_fwd", "vendor.acme", VENDOR, rmsnorm)

    def test_availability_and_architecture(self):
        def of(available):
            def fn(*arguments):
                return rmsnorm(*arguments)
            fn._is_available = available
            return fn
        self.add("rmsnorm_fwd", of(lambda: False), "vendor.absent", vendor="absent")
        self.assertFalse(self.add("rmsnorm_fwd", of(lambda: 1 / 0), "vendor.broken", vendor="broken").is_available())
        self.add("rmsnorm_fwd", rmsnorm, "vendor.newer", vendor="newer", min_arch="sm_80")
        tex.rmsnorm_fwd(*RMSNORM)
        self.assertIn((tex_form.OWN, "tex"), self.ran())
        reasons = " ".join(c["reason"] for c in te_fl.explain("rmsnorm_fwd", *RMSNORM)["candidates"])
        self.assertEqual(reasons.count("its _is_available() says no"), 2)
        self.assertIn("it needs architecture 80 or newer", reasons)
        with self.assertRaisesRegex(ValueError, "min_arch is 'hopper'"):
            self.add("rmsnorm_fwd", rmsnorm, "vendor.odd", min_arch="hopper")

    def test_equal_priorities(self):
        """flagos before vendor before reference."""
        for kind, impl_id in ((VENDOR, "vendor.a"), (REFERENCE, "reference.a"), (DEFAULT, "default.z")):
            self.add("rmsnorm_fwd", rmsnorm, impl_id, kind, "acme" if kind is VENDOR else None, priority=300)
        found = [impl.impl_id for impl in plugin_core.get_manager().resolve_candidates("rmsnorm_fwd")]
        self.assertEqual(found[:3], ["default.z", "vendor.a", "reference.a"])


class TypedOps(Registered):
    """Vendors' functions under te_fl.pytorch."""

    def lend(self, name):
        """Registers a vendor's function that computes with te-fl's, by the reference implementations."""
        own = tex_form.own_function(name)

        def fn(*arguments):
            self.calls.append(name)
            with te_fl.policy(prefer="reference", allow_vendors=None):
                return own(*arguments)
        self.add(name, fn)

    def test_the_op_computes_the_same(self):
        self.calls = []
        q = torch.randn(2, 2, 16, 16)
        cases = {
            "gelu": {"input": X}, "dgelu": {"grad": X, "input": X + 1}, "swiglu": {"input": X}, "dswiglu": {"grad": X[:, :4], "input": X},
            "clamped_swiglu": {"input": X, "limit": 2.0},
            "layernorm_fwd": {"x": X, "gamma": GAMMA, "beta": GAMMA}, "rmsnorm_fwd": {"x": X, "gamma": GAMMA, "zero_centered_gamma": True},
            "layernorm_bwd": {"dz": X, "x": X + 1, "mu": X[:, 0] * 0, "rsigma": X[:, 0] * 0 + 1, "gamma": GAMMA, "dbeta": True},
            "rmsnorm_bwd": {"dz": X, "x": X + 1, "rsigma": X[:, 0] * 0 + 1, "gamma": GAMMA},
            "rmsnorm_bwd_add": {"dz": X, "x": X + 1, "add": X, "rsigma": X[:, 0] * 0 + 1, "gamma": GAMMA},
            "scaled_softmax_forward": {"input": q, "scale": 0.5}, "scaled_masked_softmax_forward": {"input": q, "mask": q > 1, "scale": 0.5},
            "scaled_softmax_backward": {"output_grad": q, "softmax_results": q.softmax(-1), "scale": 0.5},
            "fused_rope_forward": {"input": torch.randn(3, 2, 2, 8), "freqs": torch.randn(3, 1, 1, 8), "layout": "sbhd"},
        }
        for name, arguments in cases.items():
            with self.subTest(name):
                op = getattr(te_fl.ops, name)
                expected = op(**arguments)
                self.lend(name)
                with te_fl.policy(prefer="vendor", strict=True):
                    torch.testing.assert_close(op(**arguments), expected)
                self.assertIn(name, self.calls)
        self.lend("generic_gemm")
        self.calls.clear()
        d, weight, bias = torch.empty(4, 5), torch.randn(5, 8), torch.randn(5)
        with te_fl.policy(prefer="vendor", strict=True):
            te_fl.ops.generic_gemm(a=X, b=weight, d=d, bias=bias, trans_b=True)
        torch.testing.assert_close(d, X @ weight.T + bias)
        d = torch.ones(4, 5)
        with te_fl.policy(prefer="vendor", strict=True):
            te_fl.ops.generic_gemm(a=X, b=torch.eye(8, 5), d=d, accumulate=True)
        torch.testing.assert_close(d, X[:, :5] + 1)
        self.assertEqual(self.calls, ["generic_gemm"] * 2)

    def test_optimizers(self):
        self.calls = []
        names = ("multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale")

        def step():
            params, grads, m, v = ([torch.arange(4.0) + i] for i in range(4))
            te_fl.ops.multi_tensor_adam(grads=grads, params=params, exp_avgs=m, exp_avg_sqs=v, lr=0.1, mode="adamw", weight_decay=0.1, step=3)
            norm = torch.empty(1)
            te_fl.ops.multi_tensor_l2norm(inputs=params, norm=norm)
            out = [torch.empty(4)]
            te_fl.ops.multi_tensor_scale(inputs=params, outputs=out, noop_flag=torch.zeros(1, dtype=torch.int32), scale=3.0)
            return *params, *m, *v, norm, *out
        expected = step()
        for name in names:
            self.lend(name)
        with te_fl.policy(prefer="vendor", strict=True):
            torch.testing.assert_close(step(), expected)
        self.assertEqual(set(self.calls), set(names))

    def test_a_layer(self):
        import te_fl.pytorch as te
        layer = te.LayerNormLinear(8, 8, normalization="RMSNorm", device="cpu")
        expected = layer(X)
        self.calls = []
        for name in ("rmsnorm_fwd", "generic_gemm", "rmsnorm_bwd"):
            self.lend(name)
        with te_fl.policy(prefer="vendor"):
            y = layer(X)
            y.sum().backward()
        torch.testing.assert_close(y, expected)
        self.assertLessEqual({"rmsnorm_fwd", "generic_gemm"}, set(self.calls))

    def test_a_function_that_fails(self):
        def fails(*arguments):
            raise RuntimeError("no kernel")
        expected = te_fl.ops.gelu(input=X)
        self.add("gelu", fails)
        with te_fl.policy(prefer="vendor"):
            torch.testing.assert_close(te_fl.ops.gelu(input=X), expected)
            torch.testing.assert_close(tex.gelu(X, None), expected)
        self.assertNotIn("vendor.acme", {row["impl_id"] for row in te_fl.usage()})


class Policies(Registered):
    def test_names(self):
        self.assertEqual((len(NAMES), sorted(plugin_core.__all__)), (40, sorted(NAMES)))
        for name in NAMES:
            self.assertTrue(hasattr(plugin_core, name), name)

    def test_the_environment_is_read_again(self):
        self.addCleanup(os.environ.pop, "TE_FL_DENY_VENDORS", None)
        self.add("rmsnorm_fwd", rmsnorm)
        os.environ["TE_FL_DENY_VENDORS"] = "acme"
        self.assertEqual(plugin_core.policy_from_env().deny_vendors, {"acme"})
        plugin_core.reset_global_policy()
        tex.rmsnorm_fwd(*RMSNORM)
        self.assertNotIn(("vendor.acme", "tex"), self.ran())
        self.assertFalse(plugin_core.get_policy().is_vendor_allowed("acme"))

    def test_policies(self):
        made = SelectionPolicy.from_dict(prefer="vendor", per_op_order={"gelu": ["vendor", "flagos"]}, deny_vendors={"a"}, allow_vendors={"a", "b"})
        self.assertEqual((made.get_per_op_order("gelu"), made.get_default_order()), (["vendor", "flagos"], ["vendor", "flagos", "reference"]))
        self.assertEqual([made.is_vendor_allowed(name) for name in "abc"], [False, True, False])
        self.assertEqual(made.fingerprint(), SelectionPolicy(*(getattr(made, f) for f in ("prefer", "strict", "per_op_order", "deny_vendors",
                                                                                          "allow_vendors"))).fingerprint())
        self.assertEqual(len({made, SelectionPolicy()}), 2)
        with self.assertRaisesRegex(ValueError, "Invalid prefer value"):
            SelectionPolicy(prefer="vendr")
        before, epoch = plugin_core.set_global_policy(made), plugin_core.get_policy_epoch()
        self.assertEqual((plugin_core.get_policy(), plugin_core.bump_policy_epoch()), (made, epoch + 1))
        plugin_core.set_global_policy(before)
        self.assertEqual(te_fl.policy_text(), "pure priority")  # as before, although `prefer` is reported as flagos
        self.assertIs(plugin_core.PolicyManager.get_instance(), plugin_core.PolicyManager.get_instance())

    def test_a_class_of_attention(self):
        from te_fl.plugin_core.ops import FlashAttentionBase, TEFLBackendBase

        class Fails(FlashAttentionBase):
            def _forward_impl(self, *arguments, **options):
                raise RuntimeError("no flash")

        class Works(FlashAttentionBase):
            def _forward_impl(self, query, **options):
                return query * self.softmax_scale
        self.add("get_flash_attention_class", lambda: Fails, "vendor.first", vendor="first", priority=200)
        self.add("get_flash_attention_class", lambda: Works, "vendor.second", vendor="second")
        attention = plugin_core.get_tefl_module().flash_attention(0.5)
        torch.testing.assert_close(attention(X), X / 2)
        with te_fl.policy(strict=True), self.assertRaisesRegex(RuntimeError, "no flash"):
            attention(X)

        class Backend(TEFLBackendBase):
            def is_available(self):
                return True
        with self.assertRaisesRegex(NotImplementedError, "Backend has no gelu"):
            Backend().gelu(X, None)
        module = plugin_core.get_tefl_module()
        self.assertEqual((module.DType.kInt64, module.DType.kFloat4E2M1, module.DType.kBFloat16, module["NVTE_Bias_Type"].NVTE_ALIBI), (3, 10, 6, 3))
        torch.testing.assert_close(module.relu(X, None), X.relu())

    def test_log_levels_of_python(self):
        for level, shown in (("CRITICAL", False), ("FATAL", False), ("WARN", True), ("NOTSET", True), ("critical", False)):
            done = subprocess.run([sys.executable, "-c", "import te_fl; r = te_fl.OpRegistry(); r.register(te_fl.OpImpl('rleu', 'default.a', 'default', abs))"],
                                  env={**os.environ, "TEFL_LOG_LEVEL": level}, capture_output=True, text=True)
            self.assertEqual((done.returncode, "if it was to be 'relu'" in done.stderr), (0, shown), done.stderr)


BACKEND = """
from typing import *
from ....ops import *

def _tex():
    import acme_tex
    return acme_tex

class AcmeBackend(TEFLBackendBase):
    def is_available(self):
        return _tex().AVAILABLE

    def rmsnorm_fwd(self, input, weight, eps: float, ln_out: Any, quantizer: Any, otype: DType, sm_margin: int, zero_centered_gamma: bool) -> List[Any]:
        otype = _tex().DType(int(otype)) if otype is not None else None
        return _tex().rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma)

    def gelu(self, input: torch.Tensor, quantizer: Any) -> Any:
        return _tex().gelu(input, quantizer)

    def silu(self, input: torch.Tensor, quantizer: Any) -> Any:
        return _tex().silu(input, quantizer)

    def get_attention_backend(self, attention_params=None):
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend
"""
REGISTER = """
from __future__ import annotations
import functools
from transformer_engine.plugin.core.types import OpImpl, BackendImplKind

def _bind(fn, available):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)
    wrapper._is_available = available
    return wrapper

def register_builtins(registry) -> None:
    from .acme import AcmeBackend
    backend = AcmeBackend()
    if not backend.is_available():
        return
    registry.register_many([
        OpImpl(op_name=name, impl_id="vendor.acme", kind=BackendImplKind.VENDOR, fn=_bind(getattr(backend, name), backend.is_available), vendor="ACME",
               priority=100)
        for name in ("rmsnorm_fwd", "rmsnorm_bwd", "gelu", "silu", "get_attention_backend", "swap_first_dims")])
"""
EXTENSION = """
import torch
AVAILABLE = True
class DType(int): pass
calls = []
def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    calls.append("rmsnorm_fwd")
    r = torch.rsqrt(input.float().square().mean(-1) + eps)
    return (input * r[..., None] * weight).to(input.dtype), None, r.reshape(-1)
def gelu(input, quantizer):
    calls.append("gelu")
    return torch.nn.functional.gelu(input, approximate="tanh")
"""


class Packages(unittest.TestCase):
    """A vendor's package in the tree of an installed TransformerEngine-FL."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        backend = self.root / "transformer_engine/plugin/core/backends/vendor/acme"
        backend.mkdir(parents=True)
        for part in (backend, backend.parent, backend.parent.parent, self.root / "transformer_engine"):
            (part / "__init__.py").write_text("")
        (backend / "acme.py").write_text(BACKEND)
        (backend / "register_ops.py").write_text(REGISTER)
        (self.root / "acme_tex.py").write_text(EXTENSION)

    def run_program(self, code, expect=0, python=PYTHON, **variables):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.root), os.environ.get("PYTHONPATH", "")]),
                       "TE_FL_PLUGIN_MODULES": "transformer_engine.plugin.core.backends.vendor.acme.register_ops", **variables}
        done = subprocess.run([*python, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, timeout=300)
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_it_registers_and_runs_unedited(self):
        self.run_program("""
            import te_fl; te_fl.as_transformer_engine()
            from transformer_engine.plugin.core import get_manager, get_registry
            import transformer_engine.plugin.core.types as types, te_fl.plugin_core
            assert types.OpImpl is te_fl.plugin_core.OpImpl
            import torch, acme_tex, te_fl.transformer_engine_torch as tex
            manager = get_manager()
            [plugin] = [p for p in te_fl.info()["plugins"] if "acme" in p["name"]]
            assert plugin["state"] == "active" and plugin["vendor"] == "acme", plugin
            theirs = [i.op_name for op in get_registry().list_operators() for i in get_registry().get_implementations(op) if i.impl_id == "vendor.acme"]
            assert len(theirs) == 6, theirs
            x = torch.randn(3, 8)
            torch.testing.assert_close(tex.gelu(x, None), torch.nn.functional.gelu(x, approximate="tanh"))
            torch.testing.assert_close(tex.silu(x, None), torch.nn.functional.silu(x))  # the extension has no silu
            assert tex.get_attention_backend() == -1 and acme_tex.calls == ["gelu"], acme_tex.calls
            import te_fl.pytorch as te
            with te_fl.policy(prefer="vendor"):
                te.RMSNorm(8, device="cpu")(x)
            assert acme_tex.calls == ["gelu", "rmsnorm_fwd"], acme_tex.calls
            rows = {(u["op"], u["impl_id"], u["form"]) for u in te_fl.usage()}
            assert {("gelu", "vendor.acme", "tex"), ("rmsnorm_fwd", "vendor.acme", "typed"), ("silu", "default.te_fl", "tex")} <= rows, rows
            assert manager.get_selected_impl_id("gelu") == "vendor.acme"
            from transformer_engine.plugin.core import discover_plugin, get_discovered_plugin, OpRegistry
            assert discover_plugin(get_registry()) == 1 and get_discovered_plugin()[0][1:] == ("env_module", True)
            assert discover_plugin(OpRegistry()) == 1 and discover_plugin(None) == 0
        """)

    def test_a_package_that_fails_at_import(self):
        (self.root / "transformer_engine/plugin/core/backends/vendor/acme/acme.py").write_text("import no_such_extension")
        output = self.run_program("""
            import te_fl; te_fl.as_transformer_engine()
            import torch, te_fl.transformer_engine_torch as tex
            [plugin] = [p for p in te_fl.info()["plugins"] if "acme" in p["name"]]
            assert plugin["state"] == "failed", plugin
            assert type(tex.gelu).__name__ == "function"
            tex.gelu(torch.ones(4), None)
        """)
        self.assertIn("No module named 'no_such_extension'", output)

    def test_two_packages_of_one_id(self):
        (self.root / "second.py").write_text("from transformer_engine.plugin.core.backends.vendor.acme import register_ops\n"
                                             "def register(registry):\n    register_ops.register_builtins(registry)\n")
        output = self.run_program("""
            import te_fl; te_fl.as_transformer_engine()
            import torch, te_fl.transformer_engine_torch as tex
            assert [p["state"] for p in te_fl.info()["plugins"] if p["origin"] == "TE_FL_PLUGIN_MODULES"] == ["active", "failed"], te_fl.info()["plugins"]
            tex.gelu(torch.ones(4), None)
            assert ("gelu", "vendor.acme") in {(u["op"], u["impl_id"]) for u in te_fl.usage()}
        """, TE_FL_PLUGIN_MODULES="transformer_engine.plugin.core.backends.vendor.acme.register_ops,second")
        self.assertIn("registered already", output)

    def test_te_fl_as_a_backend_of_transformer_engine_fl(self):
        """The registry there is another's: what te-fl registers are the classes of that package."""
        core = self.root / "transformer_engine/plugin/core"
        for part in (core, core.parent):
            (part / "__init__.py").write_text("")
        (core / "types.py").write_text("import dataclasses, enum, typing\nclass BackendImplKind(enum.Enum):\n    VENDOR = 'vendor'\n"
                                       "@dataclasses.dataclass\nclass OpImpl:\n    op_name: str\n    impl_id: str\n    kind: typing.Any\n    fn: typing.Any\n"
                                       "    vendor: str\n    priority: int\n")
        meta = self.root / "transformer_engine-2.14.0.dist-info"
        meta.mkdir()
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.14.0\n")
        self.run_program("""
            import torch, te_fl.transformer_engine_fl_backend as backend
            class Registry(list):
                register_many = list.extend
            registry = Registry()
            backend.register(registry)
            fns = {impl.op_name: impl for impl in registry}
            assert len(fns) > 150 and {impl.impl_id for impl in registry} == {"vendor.te_fl"}, len(fns)
            x = torch.randn(3, 8)
            torch.testing.assert_close(fns["silu"].fn(x, None), torch.nn.functional.silu(x))
        """, TE_FL_PLUGIN_MODULES="")


class Threads(Registered):
    def test_registering_while_others_call(self):
        self.add("gelu", lambda input, quantizer: torch.nn.functional.gelu(input, approximate="tanh"))
        expected, wrong = torch.nn.functional.gelu(X, approximate="tanh"), []

        def call():
            for _ in range(100):
                if not torch.allclose(tex.gelu(X, None), expected, atol=1e-6):
                    wrong.append(1)
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for round in range(5):
            self.add("silu", lambda input, quantizer: input, f"vendor.r{round}")
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])


