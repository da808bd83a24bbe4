"""MXFP8, NVFP4, custom recipes and backward overrides in te_fl.pytorch, against products of dequantised codes in FP64 by PyTorch."""

import copy
import io
import math
import unittest

import torch

import te_fl.pytorch as te
from te_fl.common import recipe
from te_fl.errors import Error, InvalidArgument, Unsupported
from te_fl.pytorch import ops as te_ops
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor

CPU = "cpu"
SIGNS = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=torch.float64)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def along_rows(x, block, square=False):
    """The blocks of x [rows, columns] and their amaxes, [rows, blocks, 1]."""
    rows, columns = x.shape
    blocks = x.double().view(rows, columns // block, block)
    amax = blocks.abs().amax(-1, keepdim=True)
    if square:
        amax = amax.view(rows // block, block, -1, 1).amax(1, keepdim=True).expand(-1, block, -1, -1).reshape(rows, -1, 1)
    return blocks, amax


def mxfp8(x, square=False, dtype=torch.float8_e4m3fn):
    """x after MXFP8 in blocks of 32 along its rows. The scale is the power of two at or above amax / largest."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32, 0, -x.shape[0] % 32 if square else 0))
    blocks, amax = along_rows(padded, 32, square)
    exponent = torch.ceil(torch.log2(amax / torch.finfo(dtype).max)).clamp(min=-127)
    scale = torch.where(amax == 0, 1.0, torch.exp2(exponent))
    return ((blocks / scale).float().to(dtype).double() * scale).view(padded.shape)[:x.shape[0], :x.shape[1]]


def nvfp4(x, square=False):
    """x after NVFP4 in blocks of 16 along its rows, with FP32 at the steps that NUMERICS has in FP32."""
    blocks, amax = along_rows(x.float(), 16, square)
    whole = x.float().abs().max()
    factor = torch.float32
    encode = (torch.tensor(2688.0) / whole).to(factor)
    scale = (amax.float() * (encode * (torch.tensor(1.0) / torch.tensor(6.0)))).clamp(max=448).to(torch.float8_e4m3fn).float()
    each = (1 / (scale * (1 / encode))).clamp(max=torch.finfo(torch.float32).max)
    scaled = (blocks.float() * each).clamp(-6, 6).double()
    # Ties go to the code with an even number.
    distance = (scaled.abs().unsqueeze(-1) - E2M1).abs()
    nearest = distance.min(-1, keepdim=True).values
    numbers = torch.arange(8).expand_as(distance)
    code = torch.where(distance == nearest, numbers + 100 * (numbers % 2), 1000).argmin(-1)
    return (E2M1[code] * scaled.sign() * scale.double() * whole.double() / 2688).view(x.shape)


def hadamard(x):
    """x^T times the signed Hadamard matrix in groups of 16 of its columns, rounded to BF16; transposed back."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    turned = x.double().t().reshape(-1, 16) @ (SIGNS.view(-1, 1) * matrix / 4)
    return turned.to(torch.bfloat16).view(x.shape[1], x.shape[0])


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def run(module, x, grad, chosen, *args):
    """(output, gradient of x, gradients of the parameters) of one step."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(x, *args)
    y.backward(grad)
    return y.detach(), x.grad, [p.grad.clone() for p in module.parameters()]


PLAIN_NVFP4 = dict(disable_rht=True, disable_stochastic_rounding=True)


class ProductsTest(unittest.TestCase):
    """The three products of Linear are those of dequantised codes."""

    def setUp(self):
        torch.manual_seed(3)
        self.layer = te.Linear(64, 96, params_dtype=torch.bfloat16, device=CPU)
        self.x = torch.randn(48, 64, dtype=torch.bfloat16) * torch.exp2(torch.randint(-6, 6, (48, 1)).float()).bfloat16()
        self.grad = torch.randn(48, 96, dtype=torch.bfloat16)

    def check(self, chosen, x_rows, w_rows, g_rows, w_columns, x_columns, g_columns):
        y, dx, (dw, db) = run(self.layer, self.x, self.grad, chosen)
        bias = self.layer.bias.detach().double()
        self.assertLess(relative(y, x_rows @ w_rows.t() + bias), 3e-3)  # BF16's rounding
        self.assertLess(relative(dx, g_rows @ w_columns), 3e-3)
        self.assertLess(relative(dw, g_columns.t() @ x_columns), 3e-3)
        self.assertLess(relative(db, self.grad.double().sum(0)), 3e-3)

    def test_mxfp8(self):
        x, w, g = self.x, self.layer.weight.detach(), self.grad
        for square in (False, True):
            with self.subTest(square=square):
                self.check(recipe.MXFP8BlockScaling(enable_2d_quantization=square), mxfp8(x), mxfp8(w, square), mxfp8(g), mxfp8(w.t(), square).t(),
                           mxfp8(x.t()).t(), mxfp8(g.t()).t())
        e5m2 = torch.float8_e5m2
        self.check(recipe.MXFP8BlockScaling(fp8_format=recipe.Format.HYBRID), mxfp8(x), mxfp8(w), mxfp8(g, dtype=e5m2), mxfp8(w.t()).t(), mxfp8(x.t()).t(),
                   mxfp8(g.t(), dtype=e5m2).t())

    def test_nvfp4(self):
        x, w, g = self.x, self.layer.weight.detach(), self.grad
        for flat in (False, True):
            with self.subTest(flat=flat):
                self.check(recipe.NVFP4BlockScaling(disable_2d_quantization=flat, **PLAIN_NVFP4), nvfp4(x), nvfp4(w, not flat), nvfp4(g),
                           nvfp4(w.t().contiguous(), not flat).t(), nvfp4(x.t().contiguous()).t(), nvfp4(g.t().contiguous()).t())

    def test_nvfp4_with_the_hadamard_transform(self):
        """The transform is of the weight gradient's operands alone, on which it cancels."""
        x, w, g = self.x, self.layer.weight.detach(), self.grad
        self.check(recipe.NVFP4BlockScaling(disable_stochastic_rounding=True), nvfp4(x), nvfp4(w, True), nvfp4(g), nvfp4(w.t().contiguous(), True).t(),
                   nvfp4(hadamard(x)).t(), nvfp4(hadamard(g)).t())

    def test_stochastic_rounding_is_unbiased(self):
        w = self.layer.weight.detach()
        chosen = recipe.NVFP4BlockScaling()
        exact = self.grad.double() @ nvfp4(w.t().contiguous(), True).t()
        found = [run(self.layer, self.x, self.grad, chosen)[1].double() for _ in range(40)]
        single, mean = relative(found[0], exact), relative(sum(found) / len(found), exact)
        self.assertGreater(relative(found[0], found[1]), 1e-2)
        self.assertLess(mean, 2.5 * single / math.sqrt(len(found)))

    def test_row_scaled_and_four_over_six(self):
        """An amax for each row makes rows independent; 4over6 never makes a block's error larger than the code 6 alone does."""
        by_rows = recipe.NVFP4BlockScaling(row_scaled_activation=True, disable_2d_quantization=True, **PLAIN_NVFP4)
        whole = run(self.layer, self.x, self.grad, by_rows)[0]
        for row in (0, 17):
            with te.autocast(recipe=by_rows):
                self.assertTrue(torch.equal(self.layer(self.x[row:row + 1]).detach(), whole[row:row + 1]))
        exact = run(self.layer, self.x, self.grad, None)[0]
        plain = run(self.layer, self.x, self.grad, recipe.NVFP4BlockScaling(**PLAIN_NVFP4))[0]
        for kind in ("MAE", "MSE"):
            adaptive = recipe.NVFP4BlockScaling(nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="none", nvfp4_4over6_err_mode=kind, **PLAIN_NVFP4)
            self.assertLess(relative(run(self.layer, self.x, self.grad, adaptive)[0], exact), relative(plain, exact))

    def test_backward_overrides(self):
        x, w, g = self.x.double(), self.layer.weight.detach().double(), self.grad.double()
        for kind, rounded in ((recipe.MXFP8BlockScaling, mxfp8), (lambda **o: recipe.NVFP4BlockScaling(disable_2d_quantization=True, **PLAIN_NVFP4, **o), nvfp4),
                              (recipe.Float8CurrentScaling, None), (recipe.Float8BlockScaling, None)):
            with self.subTest(kind=kind):
                forward = run(self.layer, self.x, self.grad, kind(backward_override=None))[0]
                y, dx, (dw, db) = run(self.layer, self.x, self.grad, kind(backward_override="high_precision"))
                self.assertTrue(torch.equal(y, forward))
                for found, exact in ((dx, g @ w), (dw, g.t() @ x), (db, g.sum(0))):
                    self.assertLess(relative(found, exact), 3e-3)
                y, dx, (dw, db) = run(self.layer, self.x, self.grad, kind(backward_override="dequantized"))
                self.assertTrue(torch.equal(y, forward))
                self.assertGreater(relative(dw, g.t() @ x), 5e-3)
                if rounded is not None:  # BF16 holds the values to 2^-9
                    self.assertLess(relative(dx, g @ rounded(self.layer.weight.detach())), 5e-3)
                    self.assertLess(relative(dw, g.t() @ rounded(self.x)), 5e-3)

    def test_sizes_that_no_block_divides(self):
        layer = te.Linear(40, 24, params_dtype=torch.float32, device=CPU)
        x, grad = torch.randn(7, 40), torch.randn(7, 24)
        y, dx, (dw, _) = run(layer, x, grad, recipe.MXFP8BlockScaling())
        w = layer.weight.detach()
        self.assertLess(relative(y, mxfp8(x) @ mxfp8(w).t() + layer.bias.detach()), 1e-6)
        self.assertLess(relative(dw, mxfp8(grad.t()) @ mxfp8(x.t()).t()), 1e-6)
        layer = te.Linear(64, 32, params_dtype=torch.bfloat16, device=CPU)
        x = torch.randn(7, 64, dtype=torch.bfloat16)
        exact, found = (run(layer, x, torch.ones(7, 32, dtype=torch.bfloat16), r) for r in (None, recipe.NVFP4BlockScaling()))
        self.assertLess(relative(found[2][0], exact[2][0]), 0.3)
        with self.assertRaisesRegex(Error, r"\(7, 40\).*multiple of 16"), te.autocast(recipe=recipe.NVFP4BlockScaling()):
            te.Linear(40, 32, params_dtype=torch.bfloat16, device=CPU)(x[:, :40].contiguous())


MODULES = {
    "Linear": lambda: te.Linear(64, 64, params_dtype=torch.bfloat16, device=CPU),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 64, params_dtype=torch.bfloat16, device=CPU),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 128, activation="swiglu", params_dtype=torch.bfloat16, device=CPU),
    "GroupedLinear": lambda: te.GroupedLinear(2, 64, 64, params_dtype=torch.bfloat16, device=CPU),
    "TransformerLayer": lambda: te.TransformerLayer(64, 128, 4, hidden_dropout=0, attention_dropout=0, params_dtype=torch.bfloat16, device=CPU),
    "MoELayer": lambda: te.MoELayer(64, 96, 4, 2, shared_ffn_hidden_size=32, params_dtype=torch.bfloat16, device=CPU),
    "ops": lambda: te_ops.Sequential(te_ops.LayerNorm(64, device=CPU, dtype=torch.bfloat16), te_ops.Linear(64, 64, device=CPU, dtype=torch.bfloat16)),
}


def mixed(role):
    """MXFP8 forward, current scaling of gradients."""
    if role.tensor_type == "grad_output":
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2)
    return te.MXFP8Quantizer(te.DType.kFloat8E4M3)


RECIPES = {
    "mxfp8": lambda **o: recipe.MXFP8BlockScaling(**o),
    "nvfp4": lambda **o: recipe.NVFP4BlockScaling(disable_stochastic_rounding=True, **o),
    "custom": lambda **o: recipe.CustomRecipe(qfactory=mixed, **o),
}


class ModulesTest(unittest.TestCase):
    """Each module with each recipe."""

    def each(self):
        for name, make in MODULES.items():
            for kind, chosen in RECIPES.items():
                with self.subTest(module=name, recipe=kind):
                    torch.manual_seed(5)
                    module, x = make(), torch.randn(32, 2, 64, dtype=torch.bfloat16)
                    args = ([24, 40],) if name == "GroupedLinear" else ()
                    yield module, x.view(64, 64) if args else x, chosen(), args, kind

    def test_steps(self):
        for module, x, chosen, args, kind in self.each():
            grad = torch.randn_like(x)
            exact, found = run(module, x, grad, None, *args), run(module, x, grad, chosen, *args)
            bound = 0.45 if kind == "nvfp4" else 0.15
            for a, b in ((found[0], exact[0]), (found[1], exact[1])):
                self.assertGreater(relative(a, b), 1e-3)
                self.assertLess(relative(a, b), bound)
            again = run(module, x, grad, chosen, *args)
            self.assertTrue(all(torch.equal(a, b) for a, b in zip((*again[:2], *again[2]), (*found[:2], *found[2]))))

    def test_recomputation_state_and_copies(self):
        for module, x, chosen, args, kind in self.each():
            grad = torch.randn_like(x)
            y, dx, grads = run(module, x, grad, chosen, *args)
            module.zero_grad()
            inp = x.clone().requires_grad_()
            with te.autocast(recipe=chosen):
                again = te.checkpoint(module, inp, *args, use_reentrant=False)
            again.backward(grad)
            self.assertTrue(torch.equal(again, y) and torch.equal(inp.grad, dx))
            self.assertTrue(all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), grads)))
            file = io.BytesIO()
            torch.save(module.state_dict(), file)
            file.seek(0)
            twin = copy.deepcopy(module)
            for p in twin.parameters():
                torch.nn.init.ones_(p)
            twin.load_state_dict(torch.load(file, weights_only=True))
            self.assertTrue(torch.equal(run(twin, x, grad, chosen, *args)[0], y))

    def test_experts_of_megatron(self):
        """The operations that megatron-core's fused grouped MLP strings together, and its head, a Linear without bias on FP32's logits."""
        x, probs, rows = torch.randn(48, 64, dtype=torch.bfloat16), torch.rand(48, dtype=torch.bfloat16), torch.tensor([16, 0, 32])
        head = te.Linear(64, 96, bias=False, params_dtype=torch.bfloat16, device=CPU)
        up, down = (te_ops.GroupedLinear(3, n, m, bias=False, dtype=torch.bfloat16, device=CPU) for n, m in ((64, 128), (64, 64)))
        found = {}
        for kind, chosen in {"none": None, **{kind: make() for kind, make in RECIPES.items()}}.items():
            inp = x.clone().requires_grad_()
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                y = head(te_ops.Sequential(up, te_ops.ScaledSwiGLU(), down)(inp, rows, probs, rows))
            y.float().square().mean().backward()
            found[kind] = (y.detach(), inp.grad)
        for kind in RECIPES:
            for a, b in zip(found[kind], found["none"]):
                self.assertTrue(1e-3 < relative(a, b) < (0.7 if kind == "nvfp4" else 0.2), kind)

    def test_compiled(self):
        layer = te.LayerNormLinear(64, 64, params_dtype=torch.bfloat16, device=CPU)
        x, grad = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
        for kind in ("mxfp8", "nvfp4"):
            chosen = RECIPES[kind]()
            y, dx, _ = run(layer, x, grad, chosen)

            def step(inp):
                with te.autocast(recipe=chosen):
                    return layer(inp)

            inp = x.clone().requires_grad_()
            out = torch.compile(step, fullgraph=True, backend="aot_eager")(inp)
            out.backward(grad)
            self.assertTrue(torch.equal(out, y) and torch.equal(inp.grad, dx))
        with self.assertRaisesRegex(Exception, "graphs of torch.compile hold no quantizers"):
            chosen = RECIPES["custom"]()
            torch.compile(lambda inp: step(inp), fullgraph=True, backend="aot_eager")(x)

    def test_microbatches_reuse_weights(self):
        for kind, chosen in RECIPES.items():
            layer, x = te.Linear(64, 64, params_dtype=torch.bfloat16, device=CPU), torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
            for first in (None, True, False):
                with te.autocast(recipe=chosen()) if first is None else te.autocast(recipe=(kept := chosen()) if first else kept):
                    layer(x, is_first_microbatch=first).sum().backward()
                gradient, x.grad = x.grad, None
                expected = gradient if first is None else expected
                self.assertTrue(torch.equal(gradient, expected), kind)

    def test_recipe_changes_between_forward_and_backward(self):
        """A backward uses its forward's recipe, whatever autocast is open."""
        layer, x, grad = MODULES["Linear"](), torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
        expected = {kind: run(layer, x, grad, chosen()) for kind, chosen in RECIPES.items()}
        for kind, chosen in RECIPES.items():
            layer.zero_grad()
            inp = x.clone().requires_grad_()
            with te.autocast(recipe=chosen()):
                y = layer(inp)
            with te.autocast(recipe=recipe.Float8BlockScaling()):
                y.backward(grad)
            self.assertTrue(torch.equal(inp.grad, expected[kind][1]), kind)

    def test_quantized_model_init(self):
        for square in (False, True):
            chosen = recipe.MXFP8BlockScaling(enable_2d_quantization=square)
            for name in ("Linear", "LayerNormMLP", "GroupedLinear", "TransformerLayer"):
                with self.subTest(name=name, square=square):
                    make = MODULES[name] if name != "TransformerLayer" else lambda: te.TransformerLayer(
                        64, 128, 4, hidden_dropout=0, attention_dropout=0, fuse_qkv_params=True, params_dtype=torch.bfloat16, device=CPU)
                    torch.manual_seed(9)
                    plain = make()
                    torch.manual_seed(9)
                    with te.quantized_model_init(recipe=chosen, preserve_high_precision_init_val=True):
                        module = make()
                    codes = [p for p in module.parameters() if isinstance(p, Float8Tensor)]
                    self.assertTrue(codes)
                    self.assertTrue(all(torch.equal(a.get_high_precision_init_val(), b.detach().to(a.dtype)) for a, b in zip(module.parameters(), plain.parameters())
                                        if isinstance(a, Float8Tensor)))
                    args = ([24, 40],) if name == "GroupedLinear" else ()
                    x = torch.randn(64, 64, dtype=torch.bfloat16) if args else torch.randn(32, 2, 64, dtype=torch.bfloat16)
                    grad = torch.randn_like(x)
                    found, expected = run(module, x, grad, chosen, *args), run(plain, x, grad, chosen, *args)
                    self.assertTrue(torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]))
                    file = io.BytesIO()
                    torch.save(module.state_dict(), file)
                    file.seek(0)
                    twin = copy.deepcopy(module)
                    with torch.no_grad():
                        for p in twin.parameters():
                            p.zero_()
                    twin.load_state_dict(torch.load(file, weights_only=True))
                    self.assertTrue(torch.equal(run(twin, x, grad, chosen, *args)[1], found[1]))
        layer, x = module.layernorm_mlp, torch.randn(32, 2, 64, dtype=torch.bfloat16)
        with self.assertRaisesRegex(Error, "codes of MXFP8 are for MXFP8BlockScaling"), te.autocast(recipe=recipe.Float8CurrentScaling()):
            layer(x)
        with self.assertRaisesRegex(Unsupported, "NVFP4BlockScaling.*in each forward"), te.quantized_model_init(recipe=recipe.NVFP4BlockScaling()):
            MODULES["Linear"]()


class CustomRecipeTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        self.x, self.grad = torch.randn(32, 64, dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)

    def same(self, layer, factory, chosen):
        own, other = run(layer, self.x, self.grad, recipe.CustomRecipe(qfactory=factory)), run(layer, self.x, self.grad, chosen)
        for a, b in zip((*own[:2], *own[2]), (*other[:2], *other[2])):
            self.assertLess(relative(a, b), 3e-3)

    def test_factories_of_the_built_in_recipes(self):
        e4m3, e5m2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2

        def current(role):
            return te.Float8CurrentScalingQuantizer(e5m2 if role.tensor_type == "grad_output" else e4m3, device=CPU)

        def blocks(role):
            return te.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True, block_scaling_dim=2 if role.tensor_type == "weight" else 1)

        def four(role):
            transforms = role.tensor_type != "weight"
            return te.NVFP4Quantizer(with_rht=transforms, with_post_rht_amax=transforms, with_2d_quantization=not transforms)

        for factory, chosen in ((current, recipe.Float8CurrentScaling()), (blocks, recipe.Float8BlockScaling()),
                                (lambda role: te.MXFP8Quantizer(e4m3), recipe.MXFP8BlockScaling()),
                                (four, recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)), (lambda role: te.IdentityQuantizer(), None)):
            with self.subTest(recipe=chosen):
                self.same(MODULES["Linear"](), factory, chosen)

    def test_hybrid(self):
        """MXFP8 forward and NVFP4 backward, from the original values or from the forward's."""
        layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device=CPU)
        for source in ("original", "rowwise_dequantized"):
            def factory(role):
                if role.tensor_type == "grad_output":
                    return te.IdentityQuantizer()
                return te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(te.DType.kFloat8E4M3), columnwise_quantizer=te.NVFP4Quantizer(),
                                          columnwise_source=source)

            y, dx, (dw,) = run(layer, self.x, self.grad, recipe.CustomRecipe(qfactory=factory))
            w, read = layer.weight.detach(), (lambda t: t) if source == "original" else (lambda t: mxfp8(t).to(torch.bfloat16))
            self.assertLess(relative(y, mxfp8(self.x) @ mxfp8(w).t()), 3e-3)
            self.assertLess(relative(dx, self.grad.double() @ nvfp4(read(w).t().contiguous()).t()), 3e-3)
            self.assertLess(relative(dw, self.grad.double().t() @ nvfp4(read(self.x).t().contiguous()).t()), 3e-3)

    def test_roles(self):
        asked = []

        def factory(role):
            asked.append((role.module_type, role.tensor_type, role.name))
            return te.MXFP8Quantizer(te.DType.kFloat8E4M3)

        chosen = recipe.CustomRecipe(qfactory=factory)
        layer = te.TransformerLayer(64, 128, 4, params_dtype=torch.bfloat16, name="block", device=CPU)
        for _ in range(2):  # the factory is called once
            run(layer, torch.randn(8, 2, 64, dtype=torch.bfloat16), torch.randn(8, 2, 64, dtype=torch.bfloat16), chosen)
        names = ["block.self_attention.layernorm_linear_qkv", "block.self_attention.proj", "block.layernorm_mlp.fc1", "block.layernorm_mlp.fc2"]
        self.assertEqual(asked, [("linear", tensor, name) for name in names for tensor in ("input", "weight", "grad_output")])
        asked.clear()
        grouped = te.GroupedLinear(2, 64, 64, params_dtype=torch.bfloat16, name="experts", device=CPU)
        run(grouped, self.x, self.grad, chosen, [8, 24])
        self.assertEqual(asked[0], ("grouped_linear", "input", "experts"))

    def test_recipes_by_module(self):
        """A factory that looks at names, and nested autocasts, give a module its own recipe."""
        first, second = (te.Linear(64, 64, params_dtype=torch.bfloat16, name=name, device=CPU) for name in ("a", "b"))
        chosen = recipe.CustomRecipe(qfactory=lambda role: te.IdentityQuantizer() if role.name == "b" else te.MXFP8Quantizer(te.DType.kFloat8E4M3))
        with te.autocast(recipe=chosen):
            y = second(first(self.x))
        with te.autocast(recipe=recipe.MXFP8BlockScaling()):
            z = first(self.x)
            with te.autocast(enabled=False):
                z = second(z)
        self.assertTrue(torch.equal(y, z))

    def test_own_quantizer(self):
        class Halves:
            def quantize(self, tensor):
                return (tensor * 2).round() / 2

        layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device=CPU)
        y, dx, (dw,) = run(layer, self.x, self.grad, recipe.CustomRecipe(qfactory=lambda role: Halves() if role.tensor_type == "input" else te.IdentityQuantizer()))
        w, x = layer.weight.detach().double(), Halves().quantize(self.x).double()
        for found, exact in ((y, x @ w.t()), (dx, self.grad.double() @ w), (dw, self.grad.double().t() @ x)):
            self.assertLess(relative(found, exact), 3e-3)

    def test_refusals(self):
        layer = MODULES["Linear"]()
        for made, error, words in ((None, InvalidArgument, "IdentityQuantizer"), (3, InvalidArgument, "has quantize"),
                                   (te.DelayedScalingRequest(), Unsupported, "use DelayedScaling")):
            with self.assertRaisesRegex(error, words), te.autocast(recipe=recipe.CustomRecipe(qfactory=lambda role: made)):
                layer(self.x)

        class Short:
            def quantize(self, tensor):
                return tensor[:, :16]

        class Raises:
            def quantize(self, tensor):
                raise KeyError("no such table")

        for quantizer, words in ((Short(), "Short.*another shape"), (Raises(), "no such table")):
            with self.assertRaisesRegex(Exception, words), te.autocast(recipe=recipe.CustomRecipe(qfactory=lambda role: quantizer)):
                layer(self.x)
        for options, words in ((dict(nvfp4_4over6="all"), "4over6 excludes"), (dict(row_scaled_activation=True), "one amax for each row excludes"),
                               (dict(fp8_dpa=True), "fp8_dpa")):
            with self.assertRaisesRegex(Error, words), te.autocast(recipe=recipe.NVFP4BlockScaling(**options)):
                layer(self.x)
        self.assertTrue(te.is_mxfp8_available() and te.is_nvfp4_available())


if __name__ == "__main__":
    unittest.main()
