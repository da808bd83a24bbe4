"""Tests ops implemented in PyTorch: tensors over the caller's memory, on the call's stream."""

import gc
import itertools
import unittest
import unittest.mock
import weakref

import torch

import te_fl
import te_fl.pytorch as te
from te_fl import BackendImplKind, OpImpl, OpRegistry
from te_fl.pytorch.autograd import call
from te_fl.pytorch.functions import softmax
from te_fl.pytorch.modules import layers

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


class Torch(unittest.TestCase):
    def add(self, op, fn, impl_id="vendor.acme", **options):
        registry = OpRegistry.instance()
        registry.register_impl(OpImpl(op, impl_id, BackendImplKind.VENDOR, fn, "acme", 1000, **{"tensors": "torch", **options}))
        self.addCleanup(registry.unregister, op, impl_id)

    def test_tensors_are_on_the_caller_s_memory(self):
        for device in DEVICES:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                with self.subTest(device=device, dtype=dtype):
                    seen = []

                    def fn(input, output):
                        seen.append((input.data_ptr(), output.data_ptr(), output.dtype, output.device.type, output.stride(), input.requires_grad))
                        torch.relu(input, out=output) if output.is_contiguous() else output.copy_(input.relu())
                    x = torch.randn(5, 7, device=device).to(dtype)
                    wide = torch.zeros(5, 14, device=device, dtype=dtype)
                    self.add("relu", fn)
                    te_fl.ops.relu(input=x, output=wide[:, 7:])
                    self.assertEqual(seen, [(x.data_ptr(), wide[:, 7:].data_ptr(), dtype, device, (14, 1), False)])
                    self.assertTrue(torch.equal(wide[:, 7:], x.relu()))
                    self.assertFalse(wide[:, :7].any())
                    self.doCleanups()

    def test_lent_tensors_become_torch_s_in_two_ways(self):
        def fn(input, output):
            output.torch().copy_(torch.from_dlpack(input).relu())
        self.add("relu", fn, tensors="te_fl")
        for device in DEVICES:
            x = torch.randn(3, 4, device=device)
            y = torch.empty_like(x)
            te_fl.ops.relu(input=x, output=y)
            self.assertTrue(torch.equal(y, x.relu()))

    def test_fp8_by_its_parts(self):
        def fn(input, output):
            output.data.copy_((input * output.scale).clamp(-448, 448))
            output.scale_inv.copy_(1 / output.scale)
        self.add("relu", fn, scalings=("none", "tensor"))
        x = torch.randn(4, 8)
        q = te_fl.Quantized(torch.empty(4, 8, dtype=torch.float8_e4m3fn), scale=torch.tensor([16.0]), scale_inv=torch.zeros(1))
        te_fl.ops.relu(input=x, output=q)
        self.assertTrue(torch.equal(q.data.view(torch.uint8), (x * 16).to(torch.float8_e4m3fn).view(torch.uint8)))
        self.assertEqual(float(q.scale_inv), 1 / 16)

    def test_tensors_that_are_kept_are_detected(self):
        kept = []
        self.add("relu", lambda input, output: kept.append(output.view(-1)))
        x = torch.randn(4)
        with self.assertRaisesRegex(te_fl.errors.Internal, "keeps 1 arrays"):
            te_fl.ops.relu(input=x, output=torch.empty(4))
        kept.clear()

    def test_calls_of_one_signature_are_repeated(self):
        """The first by fn, the second by repeat, later ones by its function; each signature has its own."""
        calls = []

        def fn(input, output, limit, alpha, glu_linear_offset=1.0):
            calls.append("fn")
            output.fill_(alpha)

        def repeat(**arguments):
            fn(**arguments)
            calls[-1] = "repeat"

            def function(tensors):
                calls.append([tuple(t.shape) for t in tensors])
                tensors[1].copy_(tensors[0][:, ::2])
            return function
        self.add("clamped_swiglu", fn, repeat=repeat)
        x = torch.randn(3, 8)

        def run(x, y, alpha=2.0):
            te_fl.ops.clamped_swiglu(input=x, output=y, limit=7.0, alpha=alpha)
            return y
        for _ in range(4):
            y = run(x, torch.empty(3, 4))
        self.assertEqual(calls, ["fn", "repeat", [(3, 8), (3, 4)], [(3, 8), (3, 4)]])
        self.assertTrue(torch.equal(y, x[:, ::2]))
        wide = torch.empty(3, 8)
        for other in (lambda: run(x, torch.empty(3, 4), alpha=3.0), lambda: run(x, wide[:, :4]), lambda: run(x.double().float()[:2], torch.empty(2, 4)),
                      lambda: run(x.half(), torch.empty(3, 4).half())):
            calls.clear()
            other()
            other()
            self.assertEqual(calls, ["fn", "repeat"])
        calls.clear()
        run(torch.randn(3, 8), torch.empty(3, 4))  # other memory
        self.assertEqual(calls, [[(3, 8), (3, 4)]])
        self.doCleanups()
        self.add("relu", lambda input, output: calls.append("fn"), repeat=lambda **_: lambda tensors: calls.append("repeated"), in_place=True)
        calls.clear()
        for output in (torch.empty(3, 8), torch.empty(3, 8), torch.empty(3, 8), x):
            te_fl.ops.relu(input=x, output=output)
        self.assertEqual(calls, ["fn", "repeated", "fn"])  # an output in the place of the input is another signature

    def test_repeated_calls_get_the_parts_of_quantised_tensors(self):
        seen = []

        def repeat(input, output):
            return lambda tensors: seen.append([(t.dtype, tuple(t.shape), t.data_ptr()) for t in tensors])
        self.add("relu", lambda input, output: None, scalings=("none", "tensor"), repeat=repeat)
        x = torch.randn(4, 8)
        q = te_fl.Quantized(torch.empty(4, 8, dtype=torch.float8_e4m3fn), columnwise_data=torch.empty(8, 4, dtype=torch.float8_e4m3fn),
                            scale=torch.tensor([16.0]), scale_inv=torch.zeros(1), amax=torch.zeros(1))
        for _ in range(3):
            te_fl.ops.relu(input=x, output=q)
        self.assertEqual(seen, [[(t.dtype, tuple(t.shape), t.data_ptr()) for t in (x, q.data, q.columnwise_data, q.scale_inv, q.amax, q.scale)]])
        other = te_fl.Quantized(q.data, scale=q.scale, scale_inv=q.scale_inv, amax=q.amax, amax_epsilon=0.5)  # another signature
        te_fl.ops.relu(input=x, output=other)
        self.assertEqual(len(seen), 1)

    def test_what_is_not_repeated_runs_fn(self):
        calls, x = [], torch.randn(4)

        def fn(input, output):
            calls.append("fn")

        def none(input, output):
            calls.append("repeat")
        self.add("relu", fn, repeat=none)
        for _ in range(4):
            te_fl.ops.relu(input=x, output=torch.empty(4))
        self.assertEqual(calls, ["fn", "repeat", "fn", "fn"])
        self.doCleanups()
        calls.clear()
        self.add("relu", fn, repeat=lambda input, output: lambda tensors: NotImplemented)
        for _ in range(4):
            te_fl.ops.relu(input=x, output=torch.empty(4))
        self.assertEqual(calls, ["fn", "fn", "fn"])
        self.doCleanups()
        kept = []
        self.add("relu", fn, repeat=lambda input, output: kept.extend)
        for _ in range(2):
            te_fl.ops.relu(input=x, output=torch.empty(4))
        with self.assertRaisesRegex(te_fl.errors.Internal, "keeps 2 arrays"):
            te_fl.ops.relu(input=x, output=torch.empty(4))
        kept.clear()
        with self.assertRaisesRegex(te_fl.errors.InvalidArgument, "repeat is .* with tensors 'te_fl'"):
            OpImpl("relu", "default.acme", BackendImplKind.DEFAULT, fn, repeat=none)

    def test_supports_gets_what_its_function_gets(self):
        seen = {}

        def fn(input, output):
            seen["fn"] = (isinstance(input, torch.Tensor), input.shape, input.dtype, input.device, input.stride(), input.is_contiguous())
            output.copy_(input)

        def supports(input):
            seen["supports"] = (isinstance(input, torch.Tensor), input.shape, input.dtype, input.device, input.stride(), input.is_contiguous())
            return input.dtype == torch.bfloat16
        self.add("relu", fn, supports=supports)
        x = torch.ones(2, 3, dtype=torch.bfloat16)
        self.assertEqual(te_fl.ops.relu(input=x).tolist(), x.tolist())
        self.assertEqual(seen["supports"], seen["fn"])
        seen.clear()
        te_fl.ops.relu(input=x.float())
        self.assertEqual(list(seen), ["supports"])

    def test_supports_is_asked_once_for_a_signature_that_is_repeated(self):
        asked = []

        def supports(input):
            asked.append(tuple(input.shape))
            return len(input.shape) == 1
        def fn(input, output):
            output.zero_()
        self.add("relu", fn, supports=supports, repeat=fn)
        for shape in (4, 4, 4, (2, 2), (2, 2)):
            y = torch.empty(shape)
            te_fl.ops.relu(input=torch.ones(shape), output=y)
        self.assertEqual((asked, y.tolist()), ([(4,), (2, 2), (2, 2)], [[1.0, 1.0], [1.0, 1.0]]))

    def test_an_exception_holds_no_tensor(self):
        seen = []

        def fn(input, output):
            mine = input.view(-1)
            seen.append(weakref.ref(mine))
            raise RuntimeError(f"no {mine.shape}")
        self.add("relu", fn)
        x = torch.randn(4)
        with self.assertRaises(te_fl.errors.Internal) as caught:
            te_fl.ops.relu(input=x, output=torch.empty(4))
        self.assertIsInstance(caught.exception.__cause__, RuntimeError)
        gc.collect()
        self.assertIsNone(seen[0]())

    def test_inside_autograd_s_backward(self):
        def fn(grad, input, output):
            output.copy_(grad * (input > 0))
        self.add("drelu", fn)

        class Relu(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.relu()

            @staticmethod
            def backward(ctx, grad):
                x, = ctx.saved_tensors
                dx = torch.empty_like(x)
                te_fl.ops.drelu(grad=grad.contiguous(), input=x, output=dx)
                return dx
        for device in DEVICES:  # a CUDA backward runs on a thread of PyTorch's
            x = torch.randn(6, device=device, requires_grad=True)
            te_fl.reset_usage()
            Relu.apply(x).sum().backward()
            self.assertTrue(torch.equal(x.grad, (x > 0).float()))
            self.assertEqual([(u["impl_id"], u["calls"]) for u in te_fl.usage()], [("vendor.acme", 1)])

    def test_torch_use_deterministic_algorithms(self):
        seen = {}

        def add(op, promises):
            def fn(deterministic, **_):
                seen[op] = deterministic
                raise NotImplementedError("the next one computes it")
            self.add(op, fn, deterministic=promises)
        for op in ("rmsnorm_fwd", "relu", "dbias_drelu", "multi_tensor_scale", "scaled_softmax_forward", "scaled_softmax_backward"):
            add(op, True)
        add("rmsnorm_bwd", False)  # does not promise deterministic results, and is skipped
        self.addCleanup(torch.use_deterministic_algorithms, False)
        runs = [call.python_run] + ([call._node.run] if call._node is not None else [])
        module = te.LayerNormMLP(8, 16, activation="relu", normalization="RMSNorm", device="cpu")
        want, flag = None, torch.zeros(1, dtype=torch.int32)
        for run, forward, backward, warns in itertools.product(runs, (False, True), (False, True), (False, True)):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
            seen.clear()
            torch.use_deterministic_algorithms(forward, warn_only=warns)
            with unittest.mock.patch.object(layers, "run", run):
                y = module(x)
            p = softmax.scaled_softmax_forward(y[None, None], 0.5)
            te_fl.ops.multi_tensor_scale(inputs=[torch.ones(3)], outputs=[torch.ones(3)], noop_flag=flag, scale=2.0)
            torch.use_deterministic_algorithms(backward, warn_only=warns)
            p.square().sum().backward()
            kept = forward or backward  # the policy of a forward applies to its backward too
            expected = {"rmsnorm_fwd": forward, "relu": forward, "scaled_softmax_forward": forward, "multi_tensor_scale": forward,
                        "scaled_softmax_backward": backward, "dbias_drelu": kept, **({} if kept else {"rmsnorm_bwd": False})}
            with self.subTest(run=run, forward=forward, backward=backward, warns=warns):
                self.assertEqual(seen, expected)
                want = x.grad if want is None else want
                self.assertTrue(torch.equal(x.grad, want))
        torch.use_deterministic_algorithms(True)
        self.add("relu", lambda input, output: None, impl_id="vendor.loose")
        with te_fl.policy(per_op={"relu": ["impl:vendor.loose"]}), self.assertRaisesRegex(te_fl.errors.Unsupported, "not deterministic"):
            module(x)
        self.assertTrue(te_fl.OpManager.instance().explain("relu", input=x.detach(), output=torch.empty(4, 8))["policy"].startswith("deterministic=1"))
        self.assertEqual(te_fl.policy_text(), "deterministic=1")
        torch.use_deterministic_algorithms(False)
        self.assertEqual(te_fl.policy_text(), "pure priority")

    @unittest.skipUnless(torch.cuda.is_available(), "there is no CUDA device")
    def test_work_goes_to_the_call_s_stream(self):
        seen = []

        def fn(input, output, stream):
            seen.append((stream, torch.cuda.current_stream().cuda_stream))
            output.copy_(input.relu())
        self.add("relu", fn)
        x, y, side = torch.randn(1024, device="cuda"), torch.empty(1024, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        te_fl.ops.relu(input=x, output=y, stream=side)
        with torch.cuda.stream(side):
            te_fl.ops.relu(input=x, output=y)
        te_fl.ops.relu(input=x, output=y)
        self.assertEqual(seen, [(side.cuda_stream, side.cuda_stream)] * 2 + [(0, 0)])
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(y, x.relu()))


if __name__ == "__main__":
    unittest.main()
