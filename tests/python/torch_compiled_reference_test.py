"""reference.torch_compiled: the compiled functions compute what reference.torch's do, and what cannot be compiled runs without compilation."""

import logging
import subprocess
import unittest
from unittest import mock

import torch

import te_fl
from forkserver import PYTHON
from te_fl.reference_torch import activation, compiled, gemm, quantize, repeat, rope
from te_fl.tensors import Quantized

E4M3 = torch.float8_e4m3fn


def quantised(rows, columns):
    return Quantized(torch.zeros(rows, columns, dtype=E4M3), columnwise_data=torch.zeros(columns, rows, dtype=E4M3), scale_inv=torch.zeros(1),
                     amax=torch.zeros(1), scale=torch.zeros(1), compute_scale=True)


def parts(t):
    return [t.data.view(torch.uint8), t.columnwise_data.view(torch.uint8), t.scale_inv, t.amax, t.scale]


def through_autograd_only(function, **_):
    """torch.compile without code generation, whose C++ compiler takes seconds for each kind of arguments."""
    return COMPILE(function, fullgraph=True, backend="aot_eager")


COMPILE = torch.compile
THREADS = """
import threading, torch
from te_fl.reference_torch import activation, compiled
COMPILE = torch.compile
torch.compile = lambda function, **_: COMPILE(function, fullgraph=True, backend="aot_eager")
run, start, failures = compiled.Compiled("srelu", activation.OPS["srelu"]), threading.Barrier(4), []

def work(dtypes):
    try:
        start.wait()
        for i in range(6):
            x = torch.randn(3 + i, 4 + i % 2).to(dtypes[i % 2])
            y = torch.empty_like(x)
            run(input=x, output=y)
            torch.testing.assert_close(y, x.float().clamp_min(0).square().to(x.dtype))
    except Exception as error:
        failures.append(error)

threads = [threading.Thread(target=work, args=((torch.float32, torch.bfloat16)[::step],)) for step in (1, -1, 1, -1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failures or "right")
"""


class CompiledReferenceTest(unittest.TestCase):
    def test_generated_code_quantises_to_the_bit(self):
        torch.manual_seed(1)
        run = compiled.Compiled("quantize", quantize.quantize)
        for rows in (24, 40):  # the second number of rows runs the kernels for any
            x = torch.randn(rows, 20).bfloat16()
            x[1, 2], x[2, 3], x[3, 4] = -torch.nan, 7.0, -0.0
            expected, found = quantised(rows, 20), quantised(rows, 20)
            quantize.quantize(x, expected, None)
            run(input=x, output=found, noop_flag=None)
            for one, other in zip(parts(expected), parts(found)):
                self.assertTrue(torch.equal(one, other))
        self.assertEqual(found.data.view(torch.uint8)[1, 2].item(), 0x7F)
        self.assertEqual(len(run._by_kind), 1)
        # The code of a recorded call is called for other tensors of the signature, without the checks of torch.compile.
        made = repeat.record("quantize", run, input=x, output=quantised(40, 20), noop_flag=None)
        y = torch.randn(40, 20).bfloat16()
        expected, found = quantised(40, 20), quantised(40, 20)
        quantize.quantize(y, expected, None)
        with mock.patch.object(run, "_function", side_effect=AssertionError), mock.patch.object(run, "_by_kind", {}):
            made([y, *found.parts()])
        for one, other in zip(parts(expected), parts(found)):
            self.assertTrue(torch.equal(one, other))

    def test_an_output_in_the_place_of_the_residual(self):
        a, b, h = torch.randn(8, 4), torch.randn(6, 4), torch.randn(8, 6)
        expected = a @ b.t() + h
        with mock.patch.object(torch, "compile", through_autograd_only), mock.patch.object(compiled, "_epilogue", compiled.Compiled("generic_gemm", gemm.epilogue)):
            d = h.clone()
            compiled._generic_gemm(a=a, b=b, d=d, bias=None, pre_gelu_out=None, pre_gelu_in=None, bias_grad=None, trans_a=False, trans_b=True, gelu=False,
                                   accumulate=False, accumulate_bias_grad=False, use_split_accumulator=True, alpha=1.0, beta=0.0,
                                   residual=torch.from_dlpack(d))
            self.assertEqual(len(compiled._epilogue._by_kind), 1)
        torch.testing.assert_close(d, expected)

    def test_rope_checks_positions_before_its_compiled_part(self):
        named = rope.ops(*(compiled.Compiled(f.__name__, f) for f in (rope.turn, rope.turn_packed, rope.turn_packed_back)))
        x, freqs, starts = torch.randn(5, 2, 3, 8), torch.randn(9, 1, 1, 6), torch.tensor([0, 3], dtype=torch.int32)
        common = {"freqs": freqs, "cu_seqlens": None, "layout": "sbhd", "interleaved": True, "cp_size": 1, "cp_rank": 0}
        with mock.patch.object(torch, "compile", through_autograd_only):
            for name in ("fused_rope_forward", "fused_rope_backward"):
                for start in (None, starts):
                    expected, found = torch.empty_like(x), torch.empty_like(x)
                    rope.OPS[name](input=x, output=expected, start_positions=start, **common)
                    named[name](input=x, output=found, start_positions=start, **common)
                    self.assertTrue(torch.equal(expected, found))
            qkv, results, freqs = torch.randn(5, 2, 2, 32), [], torch.randn(9, 1, 1, 3).repeat(1, 1, 1, 2)  # both of a pair have one angle
            for ops in (rope.OPS, named):
                q, k, v, back = torch.empty(5, 2, 4, 8), torch.empty(5, 2, 2, 8), torch.empty(5, 2, 2, 8), torch.empty_like(qkv)
                rest = {"q_freqs": freqs, "k_freqs": freqs, "start_positions": None, "q_dim": 16, "k_dim": 8, "v_dim": 8, "layout": "sbhd", "interleaved": False,
                        "cp_size": 1, "cp_rank": 0}
                ops["fused_qkv_rope_forward"](qkv_input=qkv, q_out=q, k_out=k, v_out=v, **rest)
                ops["fused_qkv_rope_backward"](q_grad=q, k_grad=k, v_grad=v, qkv_grad=back, **rest)
                results.append((q, k, v, back))
            for one, other in zip(*results):
                self.assertTrue(torch.equal(one, other))
            torch.testing.assert_close(results[0][3], qkv)  # a rotation forth and back
            with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "freqs has 9 positions, but position 9 is needed"):
                named["fused_rope_forward"](input=x, output=found, start_positions=starts + 2, **common)

    def test_overlapping_and_empty_tensors_and_modes_run_without_compilation(self):
        run = compiled.Compiled("srelu", activation.OPS["srelu"])
        with mock.patch.object(torch, "compile", side_effect=AssertionError("compiled")):
            x = torch.randn(4, 6)
            run(input=x[:, :3], output=x[:, :3].as_strided((3, 4), (6, 1)).t())  # one address, other strides
            run(input=torch.empty(0, 6), output=torch.empty(0, 6))
            with torch.utils.flop_counter.FlopCounterMode(display=False):
                run(input=torch.ones(2, 3), output=torch.empty(2, 3))

    def test_an_operation_of_pytorch_is_not_compiled(self):
        implementation = next(i for i in compiled.implementations(("cpu",), {}) if i.op_name == "gelu")
        x, y = torch.randn(4, 6), torch.empty(4, 6)
        with mock.patch.object(torch, "compile", side_effect=AssertionError("compiled")):
            implementation.fn(input=x, output=y)
        torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate="tanh"))

    def test_a_failed_compilation_is_named_once_and_the_op_runs(self):
        run = compiled.Compiled("srelu", activation.OPS["srelu"])

        def failing(error):
            def compile(function, **_):
                def call(*_, **arguments):
                    raise error
                return call
            return compile
        failures = (torch._dynamo.exc.BackendCompilerFailed(through_autograd_only, RuntimeError("no compiler for this chip"), mock.Mock()),
                    torch._dynamo.exc.FailOnRecompileLimitHit("no compiler for this chip"))
        for rows, error in enumerate(failures, 1):
            x, y = torch.randn(rows, 6), torch.empty(rows, 6)
            with mock.patch.object(torch, "compile", failing(error)), self.assertLogs(logging.getLogger("te_fl"), "WARNING") as logged:
                run(input=x, output=y)
                run(input=x, output=y)
            self.assertEqual(len(logged.output), 1)
            self.assertRegex(logged.output[0], "srelu: torch.compile failed.*no compiler for this chip")
            torch.testing.assert_close(y, x.clamp_min(0).square())

    def test_functions_that_check_values_and_long_lists_are_not_compiled(self):
        for module in compiled._MODULES:
            self.assertFalse({"require", "within"} & set(vars(module)), f"{module.__name__} has checks, which the compiler cannot trace")
        run = compiled.Compiled("multi_tensor_scale", lambda inputs, outputs: [y.copy_(x) for x, y in zip(inputs, outputs)])
        x = [torch.full((2,), float(i)) for i in range(compiled._MOST + 1)]
        y = [torch.zeros(2) for _ in x]
        with mock.patch.object(torch, "compile", side_effect=AssertionError("compiled")):
            run(inputs=x, outputs=y)
        self.assertEqual([t[0].item() for t in y], [float(i) for i in range(len(x))])

    def test_a_compiler_that_is_off_or_absent_has_a_reason(self):
        self.assertIsNone(compiled.missing("cpu"))
        self.assertTrue(compiled.missing("acme"))
        with mock.patch.object(torch._dynamo.config, "disable", True):
            self.assertIn("TORCH_COMPILE_DISABLE", compiled.missing("cpu"))

    def test_threads_whose_first_calls_compile_at_once(self):
        """PyTorch's compiler ends the process if two threads are inside it for the first time."""
        done = subprocess.run([*PYTHON, "-c", THREADS], capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stdout), (0, "right\n"), done.stderr)

    def test_many_kinds_end_in_functions_without_compilation(self):
        run = compiled.Compiled("clamped_swiglu", activation.OPS["clamped_swiglu"])
        with mock.patch.object(torch, "compile", lambda function, **_: function) as _:
            for i in range(compiled._LIMIT + 3):
                run(input=torch.ones(2, 4), output=torch.empty(2, 2), limit=float(i + 1), alpha=1.0)
        self.assertEqual(len(run._by_kind), compiled._LIMIT)


if __name__ == "__main__":
    unittest.main()
