"""Tests te_fl.flaggems with a stand-in for FlagGems on the host: what is registered, when, for which calls, and the values."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAND_IN = str(ROOT / "tests" / "python" / "flaggems_stand_in")
sys.path[:0] = [STAND_IN, str(ROOT / "bench" / "gpu")]
os.environ["STAND_IN_DEVICE"] = "cuda"  # in this process, so that ops that FlagGems has for CUDA alone are tried too
import flag_gems  # noqa: E402
import flaggems_cases as cases  # noqa: E402
import torch  # noqa: E402

import te_fl  # noqa: E402
from te_fl import _modules, _native, flaggems, frameworks  # noqa: E402
from te_fl.flaggems import kernels  # noqa: E402

IMPLEMENTATIONS = {impl.op_name: impl for impl in flaggems.implementations(("cpu",))}


def python(code, **environment):
    """Runs code in a fresh interpreter that has the stand-in; returns what it printed."""
    path = os.pathsep.join([STAND_IN, os.environ.get("PYTHONPATH", "")])
    settings = {k: v for k, v in os.environ.items() if k != "STAND_IN_DEVICE" and not k.startswith("TE_FL_")}
    done = subprocess.run([sys.executable, "-c", code], env={**settings, "PYTHONPATH": path, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout, done.stderr


class Values(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        te_fl.OpRegistry.instance().register_many(IMPLEMENTATIONS.values())
        cls.addClassCleanup(lambda: [te_fl.OpRegistry.instance().unregister(name, flaggems.IMPL_ID) for name in IMPLEMENTATIONS])

    def test_every_op_by_flaggems_is_right(self):
        for op in IMPLEMENTATIONS:
            for dtype, rows, columns, strided in ((torch.float32, 5, 33, False), (torch.bfloat16, 16, 64, True)):
                if op == "fused_attn_fwd" and dtype is torch.float32:
                    continue
                with self.subTest(op=op, dtype=dtype):
                    flag_gems.calls.clear()
                    worst, name = cases.far_off(op, *cases.draw(op, dtype, rows, columns), flaggems.IMPL_ID, "cpu", strided)
                    self.assertLessEqual(worst, 1, f"{name} of {op}")
                    self.assertTrue(flag_gems.calls, "no function of FlagGems ran")

    def test_variants_of_the_norms(self):
        for op, dtype in (("layernorm_fwd", torch.bfloat16), ("rmsnorm_fwd", torch.float16), ("layernorm_bwd", torch.bfloat16),
                          ("rmsnorm_bwd", torch.bfloat16)):
            arguments, results = cases.draw(op, dtype, 6, 40)
            arguments = {name: t.reshape(2, 3, 40) if t.shape == (6, 40) else t for name, t in arguments.items()}
            results = {name: ((2, 3, 40) if shape == (6, 40) else shape, kind) for name, (shape, kind) in results.items()}
            for more in ({}, {"zero_centered_gamma": True}):
                worst, name = cases.far_off(op, {**arguments, **more}, results, flaggems.IMPL_ID, "cpu")
                self.assertLessEqual(worst, 1, f"{name} of {op}")

    def test_fp8_results_are_cast_by_pytorch(self):
        x, gamma = torch.randn(16, 32), torch.ones(32)
        found = {}
        for impl_id in (flaggems.IMPL_ID, "reference.host"):
            z = te_fl.Quantized(torch.zeros(16, 32, dtype=torch.float8_e4m3fn), scale=torch.tensor([16.0]), scale_inv=torch.zeros(1), amax=torch.zeros(1))
            cases.run("rmsnorm_fwd", impl_id, {"x": x, "gamma": gamma, "z": z, "rsigma": torch.empty(16)})
            found[impl_id] = z
        mine, theirs = found.values()
        self.assertLess(float((mine.data.float() != theirs.data.float()).float().mean()), 0.01)
        self.assertAlmostEqual(float(mine.amax), float(theirs.amax), places=4)

    def test_products_of_half_precision(self):
        a, b, bias, out = torch.randn(8, 24).bfloat16(), torch.randn(24, 16).bfloat16(), torch.randn(16).bfloat16(), torch.zeros(8, 32).bfloat16()
        exact = a.double() @ b.double()
        flag_gems.calls.clear()
        with kernels.Kernels():
            found = [torch.mm(a, b, out_dtype=torch.float32), torch.mm(a, b, out=torch.empty(8, 16).bfloat16()), torch.mm(a, b, out=out[:, 3:19]),
                     torch.addmm(bias, a, b, out=torch.empty(8, 16).bfloat16()) - bias]
            nothing = torch.mm(a[:, :0], b[:0])
        self.assertEqual(dict(flag_gems.calls), {"mm_out": 3, "addmm_out": 1, "sub": 1})
        self.assertTrue(torch.equal(nothing, torch.zeros(8, 16).bfloat16()) and found[2].data_ptr() == out[:, 3:19].data_ptr())
        for y, near in zip(found, (1e-4, 0.1, 0.1, 0.2)):
            torch.testing.assert_close(y.double(), exact, atol=near, rtol=0)

    def refusal(self, op, **changes):
        arguments, results = cases.draw(op, torch.bfloat16, 16, 64)
        arguments.update(changes)
        explained = te_fl.explain(op, **cases.place(arguments, results, "cpu"))
        return next(c["reason"] for c in explained["candidates"] if c["impl_id"] == flaggems.IMPL_ID)

    def test_what_is_refused_has_a_reason(self):
        for text, changes in (("dropout", {"dropout_p": 0.1}), ("windows", {"window_left": 4}), ("ALiBi", {"alibi_slopes": torch.ones(4)}),
                              ("one query", {"k": torch.zeros(20, 2, 2, 64).bfloat16(), "v": torch.zeros(20, 2, 2, 64).bfloat16()})):
            self.assertIn(text, self.refusal("fused_attn_fwd", **changes))
        for rows, right in ((128, True), (130, False), (256, True)):
            long = {name: torch.zeros(rows, 2, 2, 64).bfloat16() for name in ("q", "k", "v", "o")}
            reason = self.refusal("fused_attn_fwd", **long, softmax_lse=torch.zeros(2, 2, rows), mask_type="causal")
            self.assertEqual("causal attention is wrong" not in reason, right, reason)
        self.assertIn("mask", self.refusal("add", p=0.5, mask=torch.zeros(128, dtype=torch.uint8)))

    def test_the_tables_name_every_op_once(self):
        registered, left_out = set(IMPLEMENTATIONS), set(flaggems.NOT_REGISTERED)
        self.assertEqual(registered & left_out, set())
        self.assertEqual(sorted(registered | left_out), sorted(_native.op_names()))
        for impl in IMPLEMENTATIONS.values():
            self.assertEqual((str(impl.kind), impl.impl_id, impl.vendor, impl.priority), ("default", "default.flagos", "flagos", 150))
            self.assertFalse(impl.graph_safe or impl.deterministic or impl.thread_safe)


class Registration(unittest.TestCase):
    STATE = """if True:
        import te_fl
        rows = {p["name"]: p for p in te_fl.info()["plugins"]}
        print(rows["te_fl.flaggems"]["state"], len(rows["te_fl.flaggems"]["ops"]))
    """

    def test_a_policy_loads_it(self):
        self.assertEqual(python(self.STATE, TE_FL_PREFER="flagos")[0].strip(), f"active {len(IMPLEMENTATIONS)}")

    def test_policies_that_name_it(self):
        with tempfile.NamedTemporaryFile("w") as file:
            file.write('{"per_op": {"gelu": ["impl:default.flagos"]}}')
            file.flush()
            for named, settings in ((True, {"TE_FL_PREFER": "Flagos"}), (True, {"TE_FL_PER_OP": "gelu=vendor:flagos|reference"}), (False, {}),
                                    (True, {"TE_FL_POLICY_FILE": file.name}), (False, {"TE_FL_PREFER": "default"}), (False, {"TE_FL_POLICY_FILE": "/absent"})):
                with self.subTest(settings=settings), mock.patch.dict(os.environ, settings), mock.patch.object(_modules, "_load") as load:
                    _modules.load([], True, [])
                    self.assertEqual([c.args for c in load.call_args_list if c.args[0] == "te_fl.flaggems"], [("te_fl.flaggems",)] * named)
        with mock.patch.dict(os.environ, TE_FL_PREFER="flagos"), mock.patch.object(_modules, "_load") as load:
            _modules.load([], True, ["te_fl.flaggems"])
            _modules.load([], False, [])
        load.assert_not_called()

    def test_an_import_that_fails_is_one_line(self):
        code = self.STATE + """
        from te_fl import torch_device
        torch_device._register_ops("rocm", "rocm")
        print({row["impl_id"] for row in te_fl.OpRegistry.instance().snapshot() if row["op_name"] == "gelu"} & {"default.flagos", "reference.torch"})
    """
        out, err = python(code, TE_FL_PREFER="flagos", STAND_IN_FAILS="1")
        self.assertEqual(out.splitlines(), ["failed 0", "{'reference.torch'}"])
        self.assertEqual(sum("plugin module te_fl.flaggems" in line for line in err.splitlines()), 1, err)
        self.assertIn("FlagGems' kernels are not used on rocm: RuntimeError: no device was detected, as FlagGems says; to do without", err)

    def test_a_device_made_of_pytorch_s_has_it(self):
        code = """if True:
            import te_fl
            from te_fl import torch_device
            torch_device._register_ops("cuda", "cuda")
            found = [row for row in te_fl.OpRegistry.instance().snapshot() if row["impl_id"] == "default.flagos"]
            print(len(found), {row["owner"] for row in found})
        """
        self.assertEqual(python(code, STAND_IN_DEVICE="cuda")[0].strip(), f"{len(IMPLEMENTATIONS)} {{'te_fl.flaggems'}}")
        for device, kind, settings in (("cuda", "cuda", {"TE_FL_SKIP_MODULES": "other, te_fl.flaggems"}), ("npu", "cuda", {}), ("cuda", "ext:npu", {})):
            with mock.patch.object(flag_gems, "device", device), mock.patch.dict(os.environ, settings), mock.patch.object(flaggems, "_add") as add:
                flaggems.register_for(kind)
                add.assert_not_called()
        with mock.patch.object(flag_gems, "device", "npu"):
            self.assertEqual(flaggems.device_type(), "ext:npu")

    def test_what_is_missing_is_named_with_the_command(self):
        self.assertIsNone(frameworks.flaggems_missing())
        for absent, text in ((("flag_gems", "yaml"), f"FlagGems is not installed ({frameworks.FLAGGEMS_COMMAND})"),
                             (("yaml", "sqlalchemy"), "FlagGems is installed without PyYAML, SQLAlchemy, which it imports (pip install 'te-fl[flaggems]')")):
            with mock.patch.object(frameworks, "find_spec", lambda name: None if name in absent else mock.DEFAULT):
                self.assertEqual(frameworks.flaggems_missing(), text)
                with self.assertRaisesRegex(te_fl.errors.Unsupported, re.escape(text)):
                    flaggems.register(te_fl.OpRegistry())


if __name__ == "__main__":
    unittest.main()
