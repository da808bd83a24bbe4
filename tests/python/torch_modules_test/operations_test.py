"""Tests te_fl.pytorch.ops against plain PyTorch in FP64, and the fused and unfused execution of Sequential. tests/python/inside_modules_test.py
compares them with NVIDIA's own operations."""

import copy
import pickle
import unittest

import torch
import torch.nn.functional as F

from torch_oracle import DEVICES, near, per_block, per_tensor, randn, randomise

import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from te_fl.errors import Unsupported
from te_fl.pytorch import ops


def halves(x, size=0):
    if size:
        x = x.unflatten(-1, (-1, 2, size)).transpose(-3, -2).flatten(-3)
    return x.chunk(2, -1)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def srelu(x):
    return F.relu(x).square()


def gated(function, size=0):
    return lambda x: function(halves(x, size)[0]) * halves(x, size)[1]


def clamped(limit, alpha, offset, size=0):
    def function(x):
        a, b = halves(x, size)
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
        return a * torch.sigmoid(alpha * a) * (b + offset)
    return function


def situ(beta1, beta2, size=0):
    def function(x):
        a, b = halves(x, size)
        return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)
    return function


def scaled(function):
    return lambda x, s: function(x) * s[..., None]


# (the operation, an equal function in PyTorch, shapes of extra inputs) for an input [6, 5, 32].
PLAIN = {
    "GELU": (lambda: ops.GELU(), gelu, ()), "QGELU": (lambda: ops.QGELU(), qgelu, ()), "ReLU": (lambda: ops.ReLU(), F.relu, ()),
    "SReLU": (lambda: ops.SReLU(), srelu, ()), "SiLU": (lambda: ops.SiLU(), F.silu, ()), "GLU": (lambda: ops.GLU(), gated(torch.sigmoid), ()),
    "GEGLU": (lambda: ops.GEGLU(), gated(gelu), ()), "QGEGLU": (lambda: ops.QGEGLU(), gated(qgelu), ()), "ReGLU": (lambda: ops.ReGLU(), gated(F.relu), ()),
    "SReGLU": (lambda: ops.SReGLU(), gated(srelu), ()), "SwiGLU": (lambda: ops.SwiGLU(glu_interleave_size=4), gated(F.silu, 4), ()),
    "SiTUGLU": (lambda: ops.SiTUGLU(beta1=1.0, beta2=2.0), situ(1.0, 2.0), ()),
    "ClampedSwiGLU": (lambda: ops.ClampedSwiGLU(limit=0.7, alpha=1.1, glu_linear_offset=0.5), clamped(0.7, 1.1, 0.5), ()),
    "ScaledSReLU": (lambda: ops.ScaledSReLU(), scaled(srelu), ((6, 5),)),
    "ScaledTanhSReLU": (lambda: ops.ScaledTanhSReLU(tanh_clamp_scale=0.6), scaled(lambda x: (0.6 * torch.tanh(F.relu(x) / 0.6)).square()), ((6, 5),)),
    "ScaledSwiGLU": (lambda: ops.ScaledSwiGLU(8), scaled(gated(F.silu, 8)), ((6, 5),)),
    "ScaledSiTUGLU": (lambda: ops.ScaledSiTUGLU(beta1=1.0, beta2=2.0), scaled(situ(1.0, 2.0)), ((6, 5),)),
    "ScaledClampedQGeGLU": (lambda: ops.ScaledClampedQGeGLU(4, limit=0.7), scaled(clamped(0.7, 1.702, 1.0, 4)), ((6, 5),)),
    "L2Normalization": (lambda: ops.L2Normalization(eps=0.5), lambda x: x / (x.square().sum(-1, keepdim=True) + 0.5).sqrt(), ()),
    "Identity": (lambda: ops.Identity(), lambda x: x, ()), "Reshape": (lambda: ops.Reshape((3, -1)), lambda x: x.reshape(3, -1), ()),
    "ConstantScale": (lambda: ops.ConstantScale(-1.5), lambda x: -1.5 * x, ()), "AddExtraInput": (lambda: ops.AddExtraInput(), torch.add, ((6, 5, 32),)),
    "MakeExtraOutput": (lambda: ops.MakeExtraOutput(), lambda x: (x, x), ()), "Quantize": (lambda: ops.Quantize(), lambda x: x, ()),
    "AllReduce": (lambda: ops.AllReduce(), lambda x: x, ()), "AllGather": (lambda: ops.AllGather(), lambda x: x, ()),
    "ReduceScatter": (lambda: ops.ReduceScatter(), lambda x: x, ()), "Dropout": (lambda: ops.Dropout(0.5).eval(), lambda x: x, ()),
}


class Values(unittest.TestCase):
    def near(self, got, want, tolerance, what):
        self.assertEqual(got.shape, want.shape, what)
        self.assertLessEqual((got.double().cpu() - want).norm().item(), tolerance * want.norm().item() + 1e-30, what)

    def check(self, made, plain, parameters, inputs, tolerance):
        """Compares made(*inputs) with plain(parameters in FP64, *inputs in FP64), and all gradients."""
        exact = [t.detach().double().cpu().requires_grad_() for t in inputs]
        of_parameters = {n: p.detach().double().cpu().requires_grad_() for n, p in parameters.items()}
        got, want = made(*inputs), plain(of_parameters, *exact)
        got, want = (r if isinstance(r, tuple) else (r,) for r in (got, want))
        self.assertEqual(len(got), len(want))
        for i, (a, b) in enumerate(zip(got, want)):
            self.near(a, b, tolerance, f"output {i}")
        slopes = [torch.linspace(-1, 1, b.shape[-1]) for b in want]
        sum((a.float().cpu() * s * (i + 1)).sum() for i, (a, s) in enumerate(zip(got, slopes))).backward()
        sum((b * s.double() * (i + 1)).sum() for i, (b, s) in enumerate(zip(want, slopes))).backward()
        for i, (a, b) in enumerate(zip(inputs, exact)):
            self.near(a.grad, b.grad, tolerance, f"the gradient of input {i}")
        for n, b in of_parameters.items():
            self.near(parameters[n].grad, b.grad, tolerance, f"the gradient of {n}")

    def test_operations_without_parameters(self):
        for device in DEVICES:
            for dtype, tolerance in ((torch.float32, 2e-6 if device == "cpu" else 1e-5), (torch.bfloat16, 0.01)):
                for name, (make, plain, extras) in PLAIN.items():
                    with self.subTest(name=name, device=device, dtype=dtype):
                        inputs = [randn(*s, seed=i, dtype=dtype, device=device).requires_grad_() for i, s in enumerate(((6, 5, 32), *extras))]
                        self.check(make(), lambda parameters, *x: plain(*x), {}, inputs, tolerance)

    def test_a_chain(self):
        """A Sequential of normalisations, linear operations with and without biases, an activation and a residual branch; gradients pass through all
        of them."""
        for device in DEVICES:
            for dtype, tolerance in ((torch.float32, 5e-6 if device == "cpu" else 1e-4), (torch.bfloat16, 0.02)):
                with self.subTest(device=device, dtype=dtype):
                    where = dict(device=device, dtype=dtype)
                    chain = randomise(ops.Sequential(
                        ops.MakeExtraOutput(), ops.LayerNorm((4, 8), eps=0.1, zero_centered_gamma=True, **where), ops.Reshape((12, 32)),
                        ops.Linear(32, 64, **where), ops.GEGLU(), ops.BasicLinear(32, 48, **where), ops.Bias(48, **where), torch.nn.Tanh(),
                        ops.Linear(48, 32, bias=False, **where), ops.AddExtraInput(), ops.RMSNorm(32, **where)))

                    def plain(p, x, extra):
                        y = F.layer_norm(x, (4, 8), 1 + p["1.weight"], p["1.bias"], 0.1).reshape(12, 32)
                        y = gated(gelu)(y @ p["3.weight"].T + p["3.bias"])
                        y = torch.tanh(y @ p["5.weight"].T + p["6.bias"]) @ p["8.weight"].T + extra
                        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["10.weight"], x

                    inputs = [randn(*s, seed=i, dtype=dtype, device=device).requires_grad_() for i, s in enumerate(((12, 4, 8), (12, 32)))]
                    self.check(chain, plain, dict(chain.named_parameters()), inputs, tolerance)

    def test_grouped_linear(self):
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 0.01)):
            for scale_bias in (False, True):
                with self.subTest(dtype=dtype, scale_bias=scale_bias):
                    op, rows = randomise(ops.GroupedLinear(3, 16, 8, scale_bias=scale_bias, dtype=dtype, device="cpu")), torch.tensor([5, 0, 7])
                    factors = (randn(12, seed=4, dtype=dtype).requires_grad_(),) if scale_bias else ()

                    def plain(p, x, *scales):
                        owner = torch.arange(3).repeat_interleave(rows)
                        weights, biases = (torch.stack([p[f"{kind}{i}"] for i in range(3)])[owner] for kind in ("weight", "bias"))
                        return torch.einsum("ti,toi->to", x, weights) + biases * (scales[0][:, None] if scales else 1)

                    self.check(lambda x, *scales: op(x, rows, *scales), plain, dict(op.named_parameters()),
                               [randn(12, 16, seed=3, dtype=dtype).requires_grad_(), *factors], tolerance)

    def test_a_product_and_its_bias_are_a_modules(self):
        """ops.Linear, which consists of BasicLinear and Bias, gives the result of the module te.Linear bit for bit, in FP8 too, because te-fl runs
        both operations as one linear layer in C++. The te.Linear module's delayed-scaling state can be loaded."""
        for recipe in (None, DelayedScaling(amax_history_len=4), Float8CurrentScaling()):
            op, module = ops.Linear(32, 48, device="cpu", dtype=torch.bfloat16), te.Linear(32, 48, device="cpu", params_dtype=torch.bfloat16)
            with torch.no_grad():
                module.weight.copy_(op.weight)
                module.bias.copy_(op.bias.normal_())
            for _ in range(3):
                x = [randn(16, 32, dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    results = [made(t) for made, t in zip((op, module), x)]
                for result in results:
                    result.float().square().sum().backward()
                self.assertTrue(torch.equal(*results))
                self.assertTrue(torch.equal(x[0].grad, x[1].grad))
            self.assertTrue(torch.equal(op.weight.grad, module.weight.grad) and torch.equal(op.bias.grad, module.bias.grad))

    def test_an_input_that_is_kept_as_codes(self):
        """The forward uses the unquantised input; the gradient uses the FP8 codes that were kept, which the oracle computes independently."""
        for dtype, tolerance in ((torch.float32, 5e-6), (torch.bfloat16, 0.01)):
            x = randn(6, 32, dtype=dtype).requires_grad_()
            y = ops.SwiGLU(cache_quantized_input=True)(x)
            self.near(y, gated(F.silu)(x.detach().double()), tolerance, "output")
            y.float().sum().backward()
            scale = 448 / x.detach().abs().max().float()
            rounded = ((x.detach().float() * scale).to(torch.float8_e4m3fn).float() / scale).to(dtype).double().requires_grad_()
            gated(F.silu)(rounded).sum().backward()
            self.near(x.grad, rounded.grad, tolerance, "gradient")
            exact = x.detach().double().requires_grad_()
            gated(F.silu)(exact).sum().backward()
            self.assertGreater(((x.grad - exact.grad).norm() / exact.grad.norm()).item(), 0.005)

    def test_dropout(self):
        x = torch.ones(4000, requires_grad=True)
        y = ops.Dropout(0.25)(x)
        y.sum().backward()
        self.assertTrue(torch.equal(y.detach(), x.grad))
        self.assertEqual(y.detach().unique().tolist(), [0.0, torch.tensor(1 / 0.75).item()])
        self.assertLess(abs((y == 0).float().mean().item() - 0.25), 0.04)


class OwnScale(ops.BasicOperation):
    """An operation defined by a program: x * weight."""

    def __init__(self, n):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((n,), 2.0))

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer, power=1):
        if ctx.requires_grad:
            ctx.save_for_backward(input_)
        ctx.power = power
        return input_ * self.weight ** power

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * self.weight ** ctx.power, (ctx.power * (grad_output * x * self.weight ** (ctx.power - 1)).sum(0),)


class OwnGate(ops.BasicOperation):
    """An operation defined by a program, with extra tensors: returns x * gate * weight, gate unchanged, and the number of rows."""

    num_extra_inputs, num_extra_outputs = 1, 2

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(3.0))

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, prev_op_grad_output_quantizer, next_op_input_quantizer, basic_op_kwargs):
        (gate,), = basic_op_extra_inputs
        basic_op_ctxs[0].save_for_backward(input_, gate)
        return input_ * gate * self.weight, [(gate, torch.tensor(len(input_)))]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, gate = basic_op_ctxs[0].saved_tensors
        return grad_output * gate * self.weight, [((grad_output * x * gate).sum(),)], [(grad_output * x * self.weight + basic_op_grad_extra_outputs[0][0],)]


class Containers(unittest.TestCase):
    def test_a_list(self):
        a, b, c, d = (ops.ConstantScale(n) for n in (2, 3, 5, 7))
        chain = ops.Sequential(a, b)
        chain.append(c).extend([d])
        self.assertEqual((len(chain), list(chain), chain[1], chain[-1], list(chain[1:3])), (4, [a, b, c, d], b, d, [b, c]))
        self.assertEqual(chain(torch.ones(1)).item(), 210)
        self.assertIs(chain.pop(1), b)
        self.assertEqual(list(chain.insert(0, b)), [b, a, c, d])
        del chain[2]
        chain[0] = c
        self.assertEqual(list(chain), [c, a, d])
        self.assertEqual(list(chain + [b]), [c, a, d, b])
        self.assertEqual(list(ops.Sequential({"x": a, "y": b})._modules), ["x", "y"])
        chain += [b]
        self.assertEqual(chain(torch.ones(1)).item(), 210)
        with self.assertRaisesRegex(IndexError, "index 9 of 4"):
            chain[9]

    def test_extra_tensors(self):
        chain = ops.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput(), torch.nn.Identity(), ops.AddExtraInput(), ops.MakeExtraOutput(), ops.ConstantScale(3))
        x, a, b = (torch.full((2,), v) for v in (1.0, 10.0, 100.0))
        self.assertEqual([t[0].item() for t in chain(x, a, b)], [333, 11, 111])
        for extras in ((a,), (a, b, b)):
            with self.assertRaisesRegex(ValueError, f"{len(extras)} extra inputs are given; its operations take 2"):
                chain(x, *extras)
        with self.assertRaisesRegex(ValueError, "AddExtraInput: 0 extra inputs are given; they take 1"):
            ops.AddExtraInput()(x)
        into = a.clone()
        self.assertEqual(ops.AddExtraInput(in_place=True)(x, into).data_ptr(), into.data_ptr())
        self.assertEqual(into[0].item(), 11)

    def test_an_operation_derived_from_a_supported_one(self):
        class Product(ops.BasicLinear):
            def op_forward(self, ctx, input_, **quantizers):
                return input_ @ self.weight.T * 2

            def op_backward(self, ctx, grad_output):
                return grad_output @ self.weight * 2, (None,)

        class Half(ops.GELU):
            def op_backward(self, ctx, grad_output):
                return grad_output, ()
        chain = ops.Sequential(Product(8, 8, device="cpu"), ops.Bias(8, device="cpu"))
        x = randn(4, 8).requires_grad_()
        y = chain(x)
        torch.testing.assert_close(y, 2 * x @ chain[0].weight.T)
        y.sum().backward()
        torch.testing.assert_close(x.grad, 2 * chain[0].weight.sum(0).expand(4, 8))
        with self.assertRaisesRegex(Unsupported, "Half: a custom operation"):
            Half()(x)

    def test_an_operation_of_ones_own_with_extra_tensors(self):
        op = OwnGate()
        op.set_extra_output_channel(0, "gate", output_to_caller=True)
        chain = ops.Sequential(op, ops.AddExtraInput().set_extra_input_channel(0, "gate"), ops.ConstantScale(2.0))
        inputs = [randn(4, 8, seed=i).requires_grad_() for i in range(2)]
        exact = [t.detach().requires_grad_() for t in inputs]
        y, gate, rows = chain(*inputs)
        want = 2 * (exact[0] * exact[1] * 3 + exact[1])
        torch.testing.assert_close(y, want)
        self.assertEqual(rows.item(), 4)
        (y.square().sum() + 5 * gate.sum()).backward()
        (want.square().sum() + 5 * exact[1].sum()).backward()
        for a, b in zip(inputs, exact):
            torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(op.weight.grad, (4 * want * exact[0] * exact[1]).sum().detach())

    def test_operations_of_operations(self):
        op = ops.FusedOperation([ops.FusedOperation([ops.ConstantScale(2), ops.AddExtraInput()]), ops.MakeExtraOutput(), ops.Linear(4, 4, device="cpu")])
        x, extra = randn(2, 4), randn(2, 4, seed=2)
        y, shown = op(x, extra)
        torch.testing.assert_close(shown, 2 * x + extra)
        torch.testing.assert_close(y, F.linear(shown, op.basic_ops[2].weight, op.basic_ops[2].bias))
        self.assertEqual(len(list(op.parameters())), 2)

    def test_channels(self):
        source = ops.MakeExtraOutput().set_extra_output_channel(0, "kept", output_to_caller=False)
        chain = ops.Sequential(source, ops.ConstantScale(2), ops.AddExtraInput().set_extra_input_channel(0, "kept"), ops.ConstantScale(10),
                               ops.AddExtraInput().set_extra_input_channel(0, "kept"))
        x = torch.ones(1, requires_grad=True)
        y = chain(x)
        y.backward()
        self.assertEqual((y.item(), x.grad.item()), (31, 31))
        with self.assertRaisesRegex(RuntimeError, "MakeExtraOutput: it has computed"):
            source.set_extra_output_channel(0, None)
        for message, row in (("no operation before it fills the channel 'a'", [ops.AddExtraInput().set_extra_input_channel(0, "a")]),
                             ("'a' is filled by MakeExtraOutput already", [ops.MakeExtraOutput().set_extra_output_channel(0, "a") for _ in range(2)])):
            with self.assertRaisesRegex(ValueError, message):
                ops.Sequential(*row)(x)
        with self.assertRaisesRegex(IndexError, "extra input 1 of 1"):
            ops.AddExtraInput().set_extra_input_channel(1, "a")

    def test_an_operation_of_ones_own(self):
        own = OwnScale(8)
        chain = ops.Sequential(ops.ReLU(), own, ops.Linear(8, 8, device="cpu"))
        x = randn(4, 8).requires_grad_()
        chain(x, op_kwargs={1: {"power": 3}}).sum().backward()
        y = x.detach().requires_grad_()
        weight = own.weight.detach().requires_grad_()
        F.linear(F.relu(y) * weight ** 3, chain[2].weight.detach(), chain[2].bias.detach()).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        torch.testing.assert_close(own.weight.grad, weight.grad)
        with torch.no_grad():
            self.assertFalse(own(x).requires_grad)
        with self.assertRaisesRegex(TypeError, "powr"):
            own(x, powr=2)

        class Extra(OwnScale):
            num_extra_outputs = 1

        class Short(OwnScale):
            def op_backward(self, ctx, grad_output):
                return grad_output, ()
        for kind in (Extra, ops.BasicOperation):
            with self.assertRaisesRegex(Unsupported, f"{kind.__name__}: a custom operation is supported with op_forward"):
                (kind(8) if kind is Extra else kind())(x)
        with self.assertRaisesRegex(ValueError, "Short: it has returned 0 gradients of parameters; it has 1"):
            Short(8)(x).sum().backward()
        with self.assertRaisesRegex(ValueError, "op_kwargs names Identity"):
            chain(x, op_kwargs={torch.nn.Identity(): {}})
        with self.assertRaisesRegex(TypeError, "out"):
            chain(x, op_kwargs={own: {}, 0: {"out": x}})


class Parameters(unittest.TestCase):
    def test_a_linears_parameters_are_its_operations(self):
        op = ops.Linear(8, 16, device="cpu")
        self.assertEqual(list(op.state_dict()), ["basic_ops.0.weight", "basic_ops.0._extra_state", "basic_ops.1.bias", "basic_ops.1._extra_state"])
        self.assertEqual([n for n, _ in op.named_parameters()], ["weight", "bias"])

        def one():
            self.assertIs(op.weight, op.basic_ops[0].weight)
            self.assertIs(op.bias, op.basic_ops[1].bias)
        one()
        op.weight = torch.nn.Parameter(torch.ones(16, 8))
        one()
        self.assertEqual(op(torch.ones(1, 8))[0, 0].item(), 8)
        for other in (op.to(torch.bfloat16), op.float(), copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
            self.assertIs(other.weight, other.basic_ops[0].weight)
            self.assertEqual(other(torch.ones(1, 8, dtype=other.weight.dtype))[0, 0].item(), 8)
        other = ops.Linear(8, 16, device="meta")
        other.load_state_dict(op.state_dict(), assign=True)
        self.assertEqual(other(torch.ones(1, 8))[0, 0].item(), 8)
        self.assertIs(other.weight, other.basic_ops[0].weight)
        with self.assertRaisesRegex(ValueError, "bias=False"):
            ops.Linear(8, 16, bias=False, device="cpu").bias = op.bias
        with self.assertRaisesRegex(RuntimeError, "basic_ops.1.bias"):
            op.load_state_dict({"weight": op.weight})

    def test_a_linear_with_a_parametrised_weight(self):
        linear, x = ops.Linear(32, 32, device="cpu"), randn(8, 32)
        want = 2 * linear.weight.detach()
        register = torch.nn.utils.parametrize.register_parametrization

        class Doubled(torch.nn.Module):
            def forward(self, w):
                return 2 * w
        register(linear.basic_ops[0], "weight", Doubled())
        near(self, linear(x), x.double() @ want.T.double() + linear.bias.double(), 1e-5, "output")
        other = ops.Linear(32, 32, device="cpu")
        register(other, "weight", Doubled())
        with self.assertRaisesRegex(Unsupported, "basic_ops"):
            other(x)

    def test_meta(self):
        """Parameters on the meta device get memory and values in the first forward; a program may replace them by another module's parameter before
        that."""
        torch.manual_seed(0)
        device = DEVICES[-1]
        chain = ops.Sequential(*(kind(16, device="meta") for kind in (ops.LayerNorm, ops.RMSNorm, ops.Bias)), ops.Linear(16, 16, device="meta"),
                               ops.BasicLinear(16, 8, device="meta"))
        lent = torch.nn.Parameter(torch.zeros(8, 16, device=device))
        chain[4].weight = lent
        self.assertEqual(chain(torch.randn(4, 16, device=device)).abs().max().item(), 0)
        self.assertEqual({p.device.type for p in chain.parameters()}, {device})
        self.assertIs(chain[4].weight, lent)
        self.assertEqual((chain[0].weight.min().item(), chain[2].bias.abs().max().item()), (1, 0))
        self.assertGreater(chain[3].weight.std().item(), 0)
        self.assertLessEqual(chain[3].weight.abs().max().item(), 0.25)  # uniformly distributed within 1 / sqrt(16)

    def test_gradients_into_main_grad(self):
        op = ops.Linear(8, 8, device="cpu", accumulate_into_main_grad=True)
        op.weight.main_grad = torch.ones(8, 8)
        x = randn(4, 8)
        op(x).sum().backward()
        torch.testing.assert_close(op.weight.main_grad, 1 + torch.ones(8, 4) @ x)
        op.weight.overwrite_main_grad = True
        for _ in range(2):
            (op(x) + op(2 * x)).sum().backward()  # the first backward overwrites it
            torch.testing.assert_close(op.weight.main_grad, 3 * torch.ones(8, 4) @ x)

    def test_weights_of_codes(self):
        with te.quantized_model_init(recipe=Float8CurrentScaling()):
            chain = ops.Sequential(ops.Linear(32, 32, device="cpu", dtype=torch.bfloat16), ops.BasicLinear(32, 16, device="cpu", dtype=torch.bfloat16))
        for weight in (chain[0].weight, chain[0].basic_ops[0].weight, chain[1].weight):
            self.assertIsInstance(weight, te.Float8Tensor)
        x = randn(16, 32, dtype=torch.bfloat16).requires_grad_()
        with te.autocast(recipe=Float8CurrentScaling()):
            y = chain(x)
        y.sum().backward()
        want = F.linear(F.linear(x.float(), chain[0].weight.dequantize().float(), chain[0].bias.float()), chain[1].weight.dequantize().float())
        self.assertLess(((y.float() - want).norm() / want.norm()).item(), 0.08)
        self.assertIsNotNone(chain[0].weight.grad)

    def test_torch_compile(self):
        chain = ops.Sequential(ops.LayerNorm(16, device="cpu"), ops.MakeExtraOutput(), ops.Linear(16, 32, device="cpu"), ops.SwiGLU(), ops.AddExtraInput(),
                               ops.BasicLinear(16, 16, device="cpu"))
        x, extra = randn(4, 16).requires_grad_(), randn(4, 16)
        want = chain(x, extra)
        got = torch.compile(chain, fullgraph=True, backend="aot_eager")(x, extra)
        for a, b in zip(got, want):
            self.assertTrue(torch.equal(a, b))
        grads = [torch.autograd.grad(sum(t.square().sum() for t in found), [x, *chain.parameters()]) for found in (want, got)]
        for a, b in zip(*grads):
            self.assertTrue(torch.equal(a, b))


class Quantisation(unittest.TestCase):
    def test_values_and_gradients_read_as_quantised(self):
        recipes = ((Float8CurrentScaling(), lambda t, form: per_tensor(t, form), "e5m2"),
                   (Float8BlockScaling(), lambda t, form: per_block(t, 1, 128, form), "e4m3"),
                   (Float8BlockScaling(fp8_format=Format.HYBRID), lambda t, form: per_block(t, 1, 128, form), "e5m2"))
        for device in DEVICES:
            for recipe, quantised, gradient in recipes:
                for forward, backward in ((True, False), (False, True), (True, True)):
                    with self.subTest(device=device, recipe=recipe, forward=forward, backward=backward):
                        x, grad = randn(6, 5, 160, device=device).requires_grad_(), randn(6, 5, 160, seed=2, device=device)
                        with te.autocast(recipe=recipe):
                            y = ops.Quantize(forward, backward)(x)
                        y.backward(grad)
                        rows = [t.detach().flatten(0, 1) for t in (x, grad)]
                        for got, values, form, done in ((y, rows[0], "e4m3", forward), (x.grad, rows[1], gradient, backward)):
                            near(self, got.flatten(0, 1), quantised(values, form) if done else values, 1e-6, "values")
            x = randn(6, 32, device=device)
            for recipe in (None, DelayedScaling()):
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    self.assertTrue(torch.equal(ops.Quantize(True, True)(x), x))
            with te.autocast(recipe=Float8CurrentScaling()):
                self.assertEqual(ops.Quantize()(x[:0]).shape, (0, 32))

    def test_a_product_quantises_to_the_same_codes(self):
        for device in DEVICES:
            for recipe in (Float8CurrentScaling(), Float8BlockScaling(), DelayedScaling()):
                linear = randomise(ops.Linear(64, 48, device=device))
                x = randn(32, 64, device=device)
                with te.autocast(recipe=recipe):
                    self.assertTrue(torch.equal(ops.Sequential(ops.Quantize(), linear)(x), linear(x)))


class Refusals(unittest.TestCase):
    def test_arguments(self):
        for message, make in (("p is 1.5", lambda: ops.Dropout(1.5)), ("glu_interleave_size is 3", lambda: ops.SwiGLU(glu_interleave_size=3)(torch.ones(2, 8))),
                              ("two halves", lambda: ops.GEGLU()(torch.ones(2, 7))), ("4 rows", lambda: ops.ScaledSReLU()(torch.ones(4, 8), torch.ones(3))),
                              ("tanh_clamp_scale is 0", lambda: ops.ScaledTanhSReLU(tanh_clamp_scale=0.0)), ("beta2 is inf", lambda: ops.SiTUGLU(beta2=float("inf"))),
                              ("last dimension is 8", lambda: ops.Bias(8, device="cpu")(torch.ones(2, 1))), ("basic_ops is empty", lambda: ops.FusedOperation([])),
                              ("parallel_mode is 'rows'", lambda: ops.Linear(8, 8, tensor_parallel_mode="rows"))):
            with self.assertRaisesRegex(ValueError, message):
                make()
        with self.assertRaisesRegex(TypeError, r"GELU\(\) has no argument 'cache'"):
            ops.GELU(cache=True)
        for make in (ops.GELU, ops.SiTUGLU):
            with self.assertRaisesRegex(Unsupported, "torch.float64"):
                make()(torch.ones(2, 2, dtype=torch.float64))


class Changed(unittest.TestCase):
    """Tests operations that were cast, loaded, written or compiled, and subclasses defined by a program."""

    def test_products_compute_in_the_dtype_that_their_weights_have_now(self):
        for make, inputs in ((lambda dtype: ops.Linear(8, 4, device="cpu", dtype=dtype), ()), (lambda dtype: ops.BasicLinear(8, 4, device="cpu", dtype=dtype), ()),
                             (lambda dtype: ops.GroupedLinear(2, 8, 4, device="cpu", dtype=dtype), (torch.tensor([2, 1]),))):
            op = make(torch.float32).bfloat16()
            self.assertEqual(op(randn(3, 8, dtype=torch.bfloat16), *inputs).dtype, torch.bfloat16)
            wide, x = make(torch.bfloat16).float(), randn(3, 8)
            weights = [p for p in wide.parameters() if p.dim() == 2]
            whole = torch.cat([F.linear(rows, w) for rows, w in zip(x.split([2, 1]) if inputs else (x,), weights)])
            self.assertLess((wide(x, *inputs) - whole).abs().max(), 1e-5)

    def test_a_checkpoint_of_pytorchs_linear_loads(self):
        theirs, x = torch.nn.Linear(8, 4), randn(3, 8)
        for prefix in ("", "0."):
            ours = ops.Linear(8, 4, device="cpu")
            holder = ops.Sequential(ours) if prefix else ours
            holder.load_state_dict({prefix + name: t for name, t in theirs.state_dict().items()}, strict=False)
            self.assertLess((ours(x) - theirs(x)).abs().max(), 1e-5)
        with self.assertRaisesRegex(ValueError, "its bias cannot be None; make a Linear with bias=False"):
            ours.bias = None

    def test_parameters_of_groups_are_in_the_order_of_transformer_engines(self):
        self.assertEqual([name for name, _ in ops.GroupedLinear(2, 8, 8, device="cpu").named_parameters()], ["weight0", "weight1", "bias0", "bias1"])

    def test_groups_with_and_without_memory_for_the_result(self):
        op, splits, x = ops.GroupedLinear(2, 8, 4, bias=False, device="cpu"), torch.tensor([2, 1]), randn(3, 8)
        want = op(x, splits)
        for _ in range(2):
            memory = torch.empty(3, 4)
            self.assertEqual(op(x, splits).tolist(), want.tolist())
            self.assertEqual(op(x, splits, output=memory).tolist(), want.tolist())
            self.assertEqual(memory.tolist(), want.tolist())

    def test_a_sum_in_place(self):
        for compiled in (False, True):
            op = ops.AddExtraInput(in_place=True)
            call = torch.compile(op, backend="eager") if compiled else op
            x, extra = randn(3, 4).requires_grad_(), randn(3, 4).requires_grad_()
            memory = extra * 1
            want = x + memory
            y = call(x, memory)
            y.sum().backward()
            self.assertTrue(torch.equal(y, want) and torch.equal(memory, want))
            self.assertTrue(torch.equal(x.grad, torch.ones(3, 4)) and torch.equal(extra.grad, torch.ones(3, 4)))
        narrow = randn(1, 4, dtype=torch.bfloat16).requires_grad_()
        y = ops.AddExtraInput(in_place=True)(narrow, randn(3, 4))
        y.sum().backward()
        self.assertEqual((y.dtype, narrow.grad.tolist()), (torch.float32, [[3.0] * 4]))

    def test_autocast_rounds_no_input_of_these(self):
        x = randn(3, 4)
        with torch.autocast("cpu", torch.bfloat16):
            self.assertTrue(torch.equal(ops.Dropout(0.5).eval()(x), x))
            self.assertEqual(ops.L2Normalization()(x).dtype, torch.float32)

    def test_the_hooks_of_a_programs_own_operation(self):
        class Own(ops.BasicOperation):
            def __init__(self):
                super().__init__()
                self.first, self.before = 0, []

            def pre_first_fuser_forward(self):
                self.first += 1

            def pre_fuser_forward(self, *, requires_grad):
                self.before.append(requires_grad)

            def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer):
                return 2 * input_

            def op_backward(self, ctx, grad_output):
                return 2 * grad_output, ()

        own = Own()
        row = ops.Sequential(ops.Identity(), own)
        row(randn(2, 3).requires_grad_())
        row(randn(2, 3))
        with torch.no_grad():
            row(randn(2, 3).requires_grad_())
        self.assertEqual((own.first, own.before), (1, [True, False, False]))

    def test_an_operation_that_is_twice_in_a_row_takes_its_arguments_once(self):
        class Times(ops.BasicOperation):
            def op_forward(self, ctx, input_, prev_op_grad_output_quantizer, next_op_input_quantizer, factor=2):
                return factor * input_

            def op_backward(self, ctx, grad_output):
                return grad_output, ()

        op = Times()
        self.assertEqual(ops.Sequential(op, op)(torch.ones(1), op_kwargs={op: {"factor": 3}}).item(), 6)

    def test_codes_are_taken_for_what_they_stand_for(self):
        codes = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, columnwise=False)(randn(16, 16))
        for op in (ops.Linear(16, 16, device="cpu"), ops.LayerNorm(16, device="cpu"), ops.GELU(), ops.Identity()):
            self.assertTrue(torch.equal(op(codes), op(codes.dequantize())), op)


if __name__ == "__main__":
    unittest.main()
