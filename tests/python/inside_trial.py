"""Runs a version of NVIDIA's package on te-fl, in a process of its own: python inside_trial.py FOLDER, the folder into which the pure package is
unpacked. Prints one JSON object {"version", "cases": {name: numbers, or the error text}}. The numbers are weighted sums of results and gradients, so
versions with equal numbers compute the same (tools/inside_versions.py, inside_versions_test.py)."""

import json
import sys
import warnings

warnings.filterwarnings("ignore")
sys.path.insert(0, sys.argv[1])
import te_fl  # noqa: E402

te_fl.inside_transformer_engine(device="cpu")

import torch  # noqa: E402
import transformer_engine  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.common import recipe as recipes  # noqa: E402

BF16, TOKENS, WIDTH = torch.bfloat16, 32, 128
RECIPES = {"bf16": None, "delayed": recipes.DelayedScaling(amax_history_len=4), "current": recipes.Float8CurrentScaling(),
           "block": recipes.Float8BlockScaling()}


def numbers(tensors):
    """Returns a number for each tensor that depends on the position of every element."""
    result = []
    for t in tensors:
        t = (t.dequantize() if hasattr(t, "dequantize") and hasattr(t, "_quantizer") else t).detach().double().reshape(-1)
        result.append(float(t @ torch.linspace(-1, 1, t.numel(), dtype=torch.float64).cos()))
    return result


def trained(module, recipe, *arguments, steps=2, shape=(TOKENS, WIDTH), dtype=BF16, **options):
    """Runs some steps; returns the result and all gradients of the last one."""
    torch.manual_seed(11)
    for p in module.parameters():
        if not hasattr(p, "_quantizer"):
            p.data.copy_(torch.randn(p.shape) * 0.1)
    x = torch.randn(shape, dtype=dtype).requires_grad_()
    for _ in range(steps):
        x.grad = None
        module.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x, *arguments, **options)
        y = y[0] if isinstance(y, tuple) else y
        (y.float() * torch.linspace(-1, 1, y.shape[-1])).mean().backward()
    return [y, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def grouped(recipe):
    splits = [16, 0, 32, 16]
    return trained(te.GroupedLinear(4, WIDTH, 64, params_dtype=BF16), recipe, splits, shape=(64, WIDTH))


def attention(recipe=None, **options):
    torch.manual_seed(3)
    q, k, v = (torch.randn(16, 2, 4, 16, dtype=BF16).requires_grad_() for _ in range(3))
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = te.DotProductAttention(4, 16, attention_dropout=0.0, **options)(q, k, v)
    (y.float() * torch.linspace(-1, 1, y.shape[-1])).mean().backward()
    return [y, q.grad, k.grad, v.grad]


def packed_attention():
    torch.manual_seed(3)
    ends = torch.tensor([0, 6, 16], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(16, 4, 16, dtype=BF16).requires_grad_() for _ in range(3))
    y = te.DotProductAttention(4, 16, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal")(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=10, max_seqlen_kv=10)
    (y.float() * torch.linspace(-1, 1, y.shape[-1])).mean().backward()
    return [y, q.grad, k.grad, v.grad]


def output_in_codes():
    """The first layer's output, and its gradient, are FP8 codes that the second layer reads."""
    torch.manual_seed(3)
    first, second = te.Linear(WIDTH, 64, params_dtype=BF16), te.Linear(64, 32, params_dtype=BF16)
    x = torch.randn(TOKENS, WIDTH).to(BF16).requires_grad_()
    with te.autocast(recipe=recipes.DelayedScaling()):
        y = second(first(x, fp8_output=True))
    y.float().square().sum().backward()
    return [y, x.grad, first.weight.grad, second.weight.grad]


def sequential(recipe):
    return trained(te.ops.Sequential(te.ops.LayerNorm(WIDTH, dtype=BF16), te.ops.Linear(WIDTH, 2 * WIDTH, dtype=BF16), te.ops.SwiGLU(),
                                     te.ops.Linear(WIDTH, WIDTH, dtype=BF16)), recipe)


def layer(**options):
    return te.TransformerLayer(WIDTH, 256, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, **options)


def checkpointed(recipe):
    class Recomputed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = te.LayerNormMLP(WIDTH, 256, params_dtype=BF16)

        def forward(self, x):
            return te.checkpoint(self.inner, x)

    return trained(Recomputed(), recipe)


def quantized_weights(recipe):
    torch.manual_seed(5)
    init = getattr(te, "quantized_model_init", None) or te.fp8_model_init
    with init(enabled=True, recipe=recipe):
        module = te.Linear(WIDTH, WIDTH, params_dtype=BF16)
    y = trained(module, recipe)
    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)
    optimizer.step()
    master, weight = optimizer.state[module.weight]["master_param"], module.weight.dequantize().float()
    assert (weight - master).norm() < 0.05 * master.norm(), "the codes of a weight are not those of the master weight"
    return [*y, module.weight]


def adam(**options):
    torch.manual_seed(5)
    weights = [torch.nn.Parameter(torch.randn(n, dtype=options.pop("dtype", torch.float32))) for n in (7, 33)]
    optimizer = te.optimizers.FusedAdam(weights, lr=1e-2, weight_decay=0.1, **options)
    for _ in range(3):
        for w in weights:
            w.grad = torch.sin(w.detach().float() * 3).to(w.dtype)
        optimizer.step()
    return weights


def permutation():
    from transformer_engine.pytorch import moe_permute, moe_unpermute
    torch.manual_seed(5)
    x = torch.randn(TOKENS, 16, dtype=BF16).requires_grad_()
    index = torch.stack([torch.randperm(4)[:2] for _ in range(TOKENS)]).int()
    probs = torch.rand(TOKENS, 2).requires_grad_()
    y, row_map = moe_permute(x, index, num_out_tokens=TOKENS * 2, map_type="index")
    z = moe_unpermute(y * 2, row_map, probs, map_type="index")
    (z.float() * torch.linspace(-1, 1, 16)).mean().backward()
    return [y, z, x.grad, probs.grad]


def router(score_function, **options):
    from transformer_engine.pytorch.router import fused_compute_score_for_moe_aux_loss, fused_moe_aux_loss, fused_topk_with_score_function
    torch.manual_seed(5)
    logits = torch.randn(TOKENS, 8).requires_grad_()
    probs, chosen = fused_topk_with_score_function(logits, 2, False, None, None, 1.5, score_function, None, **options)
    map_, scores = fused_compute_score_for_moe_aux_loss(logits, 2, score_function, **options)
    tokens = torch.arange(8, dtype=torch.int32) + 1
    loss = fused_moe_aux_loss(scores, tokens, TOKENS, 8, 2, 0.1)
    ((probs * torch.linspace(-1, 1, 8)).sum() + loss).backward()
    return [probs, chosen.int(), map_.int(), scores, loss, logits.grad]


def rope(layout):
    from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
    torch.manual_seed(5)
    x = torch.randn(16, 2, 4, 16, dtype=BF16).requires_grad_()
    y = apply_rotary_pos_emb(x, RotaryPositionEmbedding(16)(16), tensor_format=layout, fused=True)
    (y.float() * torch.linspace(-1, 1, 16)).mean().backward()
    return [y, x.grad]


def softmax():
    from transformer_engine.pytorch.attention.dot_product_attention.softmax import FusedScaleMaskSoftmax
    torch.manual_seed(5)
    x = torch.randn(2, 4, 32, 32, dtype=BF16).requires_grad_()
    y = FusedScaleMaskSoftmax(None)(x, None, "causal", 0.5)
    (y.float() * torch.linspace(-1, 1, 32)).mean().backward()
    return [y, x.grad]


def cross_entropy():
    torch.manual_seed(5)
    logits, target = torch.randn(2, TOKENS, 64, device="cuda").requires_grad_(), torch.randint(64, (2, TOKENS), device="cuda")
    loss = te.parallel_cross_entropy(logits, target, 0.1, False, None)
    (loss * torch.linspace(-1, 1, TOKENS)).sum().backward()
    return [loss, logits.grad]


def codes(make):
    """Quantises a tensor with a quantizer directly."""
    torch.manual_seed(5)
    x = torch.randn(64, WIDTH, dtype=BF16)
    quantised = make()(x)
    parts = [getattr(quantised, name) for name in ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")]
    return [quantised.dequantize(), *(p.view(torch.uint8) for p in parts[:2])]


def mxfp8():
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    return codes(lambda: MXFP8Quantizer(tex.DType.kFloat8E4M3))


def nvfp4():
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
    return codes(lambda: NVFP4Quantizer())


CASES = {}
for name, recipe in RECIPES.items():
    CASES.update({
        f"Linear {name}": lambda r=recipe: trained(te.Linear(WIDTH, 64, params_dtype=BF16), r),
        f"LayerNormLinear {name}": lambda r=recipe: trained(te.LayerNormLinear(WIDTH, 64, params_dtype=BF16), r),
        f"LayerNormMLP {name}": lambda r=recipe: trained(te.LayerNormMLP(WIDTH, 256, activation="swiglu", normalization="RMSNorm", params_dtype=BF16), r),
        f"GroupedLinear {name}": lambda r=recipe: grouped(r),
        f"TransformerLayer {name}": lambda r=recipe: trained(layer(), r, shape=(16, 2, WIDTH)),
        f"te.ops.Sequential {name}": lambda r=recipe: sequential(r),
        f"checkpoint {name}": lambda r=recipe: checkpointed(r)})
    if recipe is not None:
        CASES[f"quantized_model_init {name}"] = lambda r=recipe: quantized_weights(r)
# Stochastic rounding is off, because its numbers differ between runs; other tests cover it.
BLOCKS = {"mxfp8": recipes.MXFP8BlockScaling(), "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)}
for name, recipe in BLOCKS.items():
    CASES[f"TransformerLayer {name}"] = lambda r=recipe: trained(layer(), r, shape=(16, 2, WIDTH))
CASES.update({
    "Linear fp8_output": output_in_codes, "TransformerLayer fp8_dpa": lambda: trained(layer(), recipes.DelayedScaling(fp8_dpa=True), shape=(16, 2, WIDTH)),
    "Linear float32": lambda: trained(te.Linear(WIDTH, 64, params_dtype=torch.float32), None, dtype=torch.float32),
    "TransformerLayer padding": lambda: trained(layer(self_attn_mask_type="padding"), None, attention_mask=_mask(), shape=(16, 2, WIDTH)),
    "DotProductAttention causal": attention, "DotProductAttention no_mask": lambda: attention(attn_mask_type="no_mask"),
    "DotProductAttention window": lambda: attention(window_size=(4, 0)), "DotProductAttention thd": packed_attention,
    "DotProductAttention fp8": lambda: attention(recipes.DelayedScaling(fp8_dpa=True)),
    "parallel_cross_entropy": cross_entropy, "FusedAdam": adam, "FusedAdam bf16": lambda: adam(dtype=BF16, master_weights=True), "moe_permute": permutation,
    "router softmax": lambda: router("softmax"), "router sigmoid": lambda: router("sigmoid"), "rope sbhd": lambda: rope("sbhd"),
    "rope bshd": lambda: rope("bshd"), "softmax": softmax, "MXFP8Quantizer": mxfp8, "NVFP4Quantizer": nvfp4})


def _mask():
    return (torch.arange(16) >= torch.tensor([[9], [16]])).view(2, 1, 1, 16)


def run():
    wanted, found = sys.argv[2:], {}
    for name, case in CASES.items():
        if wanted and not any(w in name for w in wanted):
            continue
        try:
            found[name] = numbers(case())
        except Exception as error:  # records the error of a refused case and goes on with the others
            found[name] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    version = getattr(transformer_engine, "__version__", None)
    print(json.dumps({"version": str(version), "cases": run()}))
