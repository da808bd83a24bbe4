"""torch.autograd.gradcheck on te_fl.pytorch's modules and functions in FP32: gradients against differences of the forward alone, gradients
of unused outputs, and backwards that give the same gradients when they run again (on the CPU the same bits).

FP8 is left out: a quantised forward is a step function, whose finite differences are meaningless. FP32 rounds, so the step is 1e-2 and inputs are of
order 1; a wrong term in a gradient is far beyond the tolerance.
"""

import os
import sys
import unittest
import warnings

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from torch_oracle import DEVICES, randn, randomise  # noqa: E402

import te_fl.pytorch as te  # noqa: E402
from te_fl.pytorch.functions import rope, softmax  # noqa: E402

STEP = dict(eps=1e-2, atol=2e-3, rtol=1e-2, nondet_tol=0.0 if DEVICES == ["cpu"] else 1e-5)


def operand(*shape, seed=1, device="cpu"):
    return randn(*shape, seed=seed, device=device).requires_grad_()


class Checked(unittest.TestCase):
    def check(self, function, *inputs):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Input #")  # gradcheck warns that the inputs are not FP64
            self.assertTrue(torch.autograd.gradcheck(function, inputs, **STEP))

    def check_module(self, module, *inputs, call=None):
        """Checks the gradients of all parameters and of the inputs."""
        names, parameters = zip(*randomise(module).named_parameters())

        def function(*tensors):
            values = dict(zip(names, tensors[len(inputs):]))
            return torch.func.functional_call(module, values, tensors[:len(inputs)], call or {})

        self.check(function, *inputs, *parameters)


class Modules(Checked):
    def test_linear(self):
        for device in DEVICES:
            self.check_module(te.Linear(8, 5, device=device), operand(3, 8, device=device))
            self.check_module(te.Linear(8, 6, parameters_split=("a", "b"), bias=False, device=device), operand(3, 8, device=device))

    def test_norms(self):
        for device in DEVICES:
            for norm in (te.LayerNorm, te.RMSNorm):
                for zero_centered in (False, True):
                    with self.subTest(norm=norm.__name__, zero_centered=zero_centered):
                        self.check_module(norm(8, zero_centered_gamma=zero_centered, device=device), operand(3, 8, device=device))

    def test_layernorm_linear_with_both_outputs(self):
        for device in DEVICES:
            self.check_module(te.LayerNormLinear(8, 5, return_layernorm_output=True, device=device), operand(3, 8, device=device))

    def test_layernorm_mlp(self):
        for device in DEVICES:
            for activation in ("gelu", "geglu", "qgelu", "silu", "swiglu"):  # activations that are differentiable everywhere
                with self.subTest(activation=activation):
                    module = te.LayerNormMLP(8, 8, activation=activation, normalization="RMSNorm", device=device)
                    self.check_module(module, operand(2, 8, device=device))

    def test_attention(self):
        for device in DEVICES:
            for mask, groups in (("no_mask", 2), ("causal", 2), ("causal", 1)):
                with self.subTest(mask=mask, groups=groups):
                    module = te.DotProductAttention(2, 16, num_gqa_groups=groups, attention_dropout=0.0, attn_mask_type=mask)
                    q = operand(4, 1, 2, 16, device=device)
                    k, v = (operand(4, 1, groups, 16, seed=seed, device=device) for seed in (2, 3))
                    self.check(lambda *qkv: module(*qkv), q, k, v)

    def test_transformer_layer(self):
        for device in DEVICES:
            module = te.TransformerLayer(16, 16, 2, hidden_dropout=0.0, attention_dropout=0.0, device=device)
            self.check_module(module, operand(3, 1, 16, device=device))

    def test_decoder_layer(self):
        for device in DEVICES:
            layer = te.TransformerLayer(16, 16, 1, layer_type="decoder", hidden_dropout=0.0, attention_dropout=0.0, device=device)
            layer.requires_grad_(False)
            randomise(layer)
            self.check(lambda x, encoded: layer(x, encoder_output=encoded), operand(2, 1, 16, device=device), operand(3, 1, 16, seed=2, device=device))


class Functions(Checked):
    def test_softmax(self):
        for device in DEVICES:
            x, mask = operand(1, 2, 4, 4, device=device), randn(1, 1, 4, 4, seed=5, device=device) > 1
            self.check(lambda x: softmax.scaled_softmax_forward(x, 0.5), x)
            self.check(lambda x: softmax.scaled_masked_softmax_forward(x, mask, 0.5), x)
            self.check(lambda x: softmax.scaled_aligned_causal_masked_softmax_forward(x, 0.5), x)
            self.check(lambda x: softmax.scaled_upper_triang_masked_softmax_forward(x, 0.5), operand(2, 4, 4, device=device))

    def test_rope(self):
        for device in DEVICES:
            for interleaved in (False, True):
                angles = te.RotaryPositionEmbedding(8, interleaved=interleaved)(4).to(device)
                self.check(lambda t: rope.apply_rotary_pos_emb(t, angles, "sbhd", interleaved=interleaved), operand(4, 1, 2, 16, device=device))

    def test_cross_entropy(self):
        for device in DEVICES:
            target = torch.tensor([[1, -100], [0, 3]], device=device)
            for smoothing in (0.0, 0.2):
                for mean in (False, True):
                    self.check(lambda x: te.parallel_cross_entropy(x, target, smoothing, mean), operand(2, 2, 6, device=device))

    def test_it_finds_a_wrong_gradient(self):
        class Wrong(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return softmax.scaled_softmax_forward(x, 0.5)

            @staticmethod
            def backward(ctx, grad):
                return 0.5 * grad

        with self.assertRaisesRegex(RuntimeError, "Jacobian mismatch"):
            self.check(Wrong.apply, operand(1, 2, 4, 4))


if __name__ == "__main__":
    unittest.main()
