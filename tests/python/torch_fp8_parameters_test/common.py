"""Tests weights that exist only as FP8 codes (te.quantized_model_init): against plain PyTorch on codes decoded by NumPy, in training, and as
tensors."""

import numpy as np
import torch

from torch_oracle import per_block, per_tensor, randn
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DELAYED, CURRENT, BLOCK = DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()
POW2 = Float8CurrentScaling(use_power_2_scales=True)
RECIPES = (DELAYED, CURRENT, BLOCK)
MODULES = {
    "Linear": lambda **k: te.Linear(160, 144, **k),
    "Linear named": lambda **k: te.Linear(160, 144, parameters_split=("query",), **k),
    "LayerNormLinear": lambda **k: te.LayerNormLinear(160, 144, **k),
    "LayerNormMLP": lambda **k: te.LayerNormMLP(160, 192, **k),
    "TransformerLayer": lambda **k: te.TransformerLayer(160, 192, 4, hidden_dropout=0, attention_dropout=0, fuse_qkv_params=True, **k),
}
WEIGHTS = {"Linear": ["weight"], "Linear named": ["query_weight"], "LayerNormLinear": ["weight"], "LayerNormMLP": ["fc1_weight", "fc2_weight"],
           "TransformerLayer": ["self_attention.layernorm_qkv.weight", "self_attention.proj.weight", "layernorm_mlp.fc1_weight",
                                "layernorm_mlp.fc2_weight"]}


def made(name, recipe=CURRENT, device="cpu", preserve=False, **arguments):
    """Makes a module with FP8 weights. Its weights are larger than Transformer Engine's initial ones, so that all parts of a layer matter."""
    torch.manual_seed(3)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        module = MODULES[name](device=device, **arguments)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, device=device) / p.shape[-1] ** 0.5)
    return module


def codes(module):
    return {n: p for n, p in module.named_parameters() if isinstance(p, Float8Tensor)}


def table():
    """Returns the values of E4M3's 256 codes: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0 ** -6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where((code & 127) == 127, np.nan, values)
    return np.where(code >= 128, -values, values)


def decoded(parameter):
    """Decodes a parameter's values in FP64 by NumPy, from its bytes and scales."""
    values = table()[parameter._data.cpu().numpy()]
    factors = parameter._scale_inv.cpu().numpy().astype(np.float64)
    if factors.ndim == 2:
        rows, columns = values.shape
        factors = np.repeat(np.repeat(factors, 128, 0)[:rows], 128, 1)[:, :columns]
    return torch.from_numpy(values * factors)


def expected(values, recipe):
    """Quantises the values as the recipe does; returns the dequantised values."""
    values = values.float()
    if isinstance(recipe, Float8BlockScaling):
        return per_block(values, 128, 128)
    pow2 = isinstance(recipe, Float8CurrentScaling) and recipe.fp8_quant_fwd_weight.power_2_scale
    return per_tensor(values, "e4m3", getattr(recipe, "margin", 0), pow2)


def make_input(device="cpu", seed=1, dtype=F32):
    return randn(16, 2, 160, seed=seed, dtype=dtype, device=device).requires_grad_()


def step(module, recipe=CURRENT, device="cpu", seed=1, dtype=F32):
    """Returns the output and the gradients of the input and of the parameters."""
    module.zero_grad()
    x = make_input(device, seed, dtype)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]
