"""Transformer layers (te-fl's nn, and the same computation in eager PyTorch) and the GEMMs and attention inside them."""

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cublaslt_candidates import BLOCK128, VEC128
from te_fl_bench import BLOCK_1X128, BLOCK_128X128, COMPUTE_SCALE, OpCall, Layer, fp8, numbers, plain, quantised, rescale

BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass
class Shape:
    name: str
    hidden: int
    ffn: int
    heads: int
    sequence: int
    batch: int
    groups: int = 0
    causal: bool = False
    llama: bool = False

    def spec(self):
        return dict(hidden=self.hidden, ffn=self.ffn, heads=self.heads, groups=self.groups, causal=self.causal,
                    llama=self.llama)


QUICKSTART = Shape("quickstart", 4096, 16384, 32, 2048, 4)
CAUSAL = Shape("quickstart causal", 4096, 16384, 32, 2048, 4, causal=True)
LLAMA = Shape("llama block", 4096, 11008, 32, 4096, 2, groups=8, causal=True, llama=True)
SMALL = Shape("small", 1024, 4096, 16, 512, 1)


def activations(shape):
    x = torch.randn(shape.sequence, shape.batch, shape.hidden, device="cuda", dtype=BF16)
    return x, torch.randn_like(x) * 0.1


def angles(shape):
    dim = shape.hidden // shape.heads
    inverse = 10000.0 ** (-torch.arange(0, dim, 2, device="cuda", dtype=F32) / dim)
    a = torch.arange(shape.sequence, device="cuda", dtype=F32)[:, None] * inverse
    return torch.cat([a, a], dim=-1).view(shape.sequence, 1, 1, dim).contiguous()


class EagerLayer(torch.nn.Module):
    """The layer as a PyTorch user writes it: pre-norm, [sequence, batch, hidden]. The caller selects SDPA's backend."""

    def __init__(self, s):
        super().__init__()
        self.s, self.dim = s, s.hidden // s.heads
        groups = s.groups or s.heads
        self.groups = groups
        bias = not s.llama
        norm = torch.nn.RMSNorm if s.llama else torch.nn.LayerNorm
        make = dict(device="cuda", dtype=BF16)
        self.norm1, self.norm2 = norm(s.hidden, eps=1e-5, **make), norm(s.hidden, eps=1e-5, **make)
        self.qkv = torch.nn.Linear(s.hidden, (s.heads + 2 * groups) * self.dim, bias=bias, **make)
        self.proj = torch.nn.Linear(s.hidden, s.hidden, bias=bias, **make)
        self.fc1 = torch.nn.Linear(s.hidden, s.ffn * (2 if s.llama else 1), bias=bias, **make)
        self.fc2 = torch.nn.Linear(s.ffn, s.hidden, bias=bias, **make)
        if s.llama:
            a = angles(s)
            self.cos, self.sin = a.cos().to(BF16), a.sin().to(BF16)

    def rotate(self, x):
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * self.cos + turned * self.sin

    def forward(self, x):
        s, groups = self.s, self.groups
        per_group = s.heads // groups
        mixed = self.qkv(self.norm1(x)).view(s.sequence, s.batch, groups, per_group + 2, self.dim)
        q, k, v = mixed.split([per_group, 1, 1], dim=3)
        q = q.reshape(s.sequence, s.batch, s.heads, self.dim)
        k, v = k.squeeze(3), v.squeeze(3)
        if s.llama:
            q, k = self.rotate(q), self.rotate(k)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=s.causal, enable_gqa=groups != s.heads)
        h = x + self.proj(o.permute(2, 0, 1, 3).reshape(s.sequence, s.batch, s.hidden))
        z = self.fc1(self.norm2(h))
        if s.llama:
            gate, up = z.chunk(2, dim=-1)
            z = torch.nn.functional.silu(gate) * up
        else:
            z = torch.nn.functional.gelu(z, approximate="tanh")
        return h + self.fc2(z)


class Eager:
    """Eager PyTorch's layer; step() clears the gradients and runs forward and backward."""

    def __init__(self, shape, x, dy, backend=SDPBackend.CUDNN_ATTENTION):
        self.layer, self.x, self.dy, self.backend = EagerLayer(shape), x.clone().requires_grad_(), dy, backend

    def step(self):
        for p in self.layer.parameters():
            p.grad = None
        self.x.grad = None
        with sdpa_kernel(self.backend):
            self.y = self.layer(self.x)
        self.y.backward(self.dy)

    def copy_parameters(self, layer):
        """Copies the parameters of te-fl's layer into PyTorch's."""
        names = {"self_attention.layernorm_qkv.layer_norm_weight": "norm1.weight",
                 "self_attention.layernorm_qkv.layer_norm_bias": "norm1.bias",
                 "self_attention.layernorm_qkv.weight": "qkv.weight", "self_attention.layernorm_qkv.bias": "qkv.bias",
                 "self_attention.proj.weight": "proj.weight", "self_attention.proj.bias": "proj.bias",
                 "layernorm_mlp.layer_norm_weight": "norm2.weight", "layernorm_mlp.layer_norm_bias": "norm2.bias",
                 "layernorm_mlp.fc1_weight": "fc1.weight", "layernorm_mlp.fc1_bias": "fc1.bias",
                 "layernorm_mlp.fc2_weight": "fc2.weight", "layernorm_mlp.fc2_bias": "fc2.bias"}
        own = dict(self.layer.named_parameters())
        pairs = []
        for i, p in enumerate(layer.parameters()):
            target = own[names[p["name"]]]
            target.data.copy_(layer.view(1000 + i, p["shape"]))
            pairs.append((i, p, target))
        return pairs


def te_fl_layer(library, shape, x, dy, recipe, cached=True):
    extra = dict(angles=angles(shape)) if shape.llama else {}
    return Layer(library, x, dy, recipe=recipe, cached=cached, **shape.spec(), **extra)


# ---- the GEMMs of the quickstart layer

PRODUCTS = {"qkv": (12288, 4096), "proj": (4096, 4096), "fc1": (16384, 4096), "fc2": (4096, 16384)}  # out, in
TOKENS = 8192


def product(library, name, kind, dtype, sets, more=""):
    """For each buffer set, returns te-fl's call and the arguments of the library's direct call: (a, b, d, bias, trans_a, trans_b, fast, scales,
    modes). dtype: "bf16", "fp8" (per tensor) or "block" (weights in blocks of 128x128, other tensors in blocks of 1x128). `more` adds an argument to
    te-fl's call as in the layer: "residual" (forward of proj and fc2) or "bias_grad" (wgrad in BF16)."""
    out, inner = PRODUCTS[name]
    m, n, k = {"forward": (TOKENS, out, inner), "dgrad": (TOKENS, inner, out), "wgrad": (out, inner, TOKENS)}[kind]
    pairs = []
    for _ in range(sets):
        d = plain(m, n)
        bias = plain(n) if kind == "forward" else None
        extra = dict(bias=bias) if bias is not None else {}
        if more:
            extra[more] = plain(*{"residual": (m, n), "bias_grad": (m,)}[more])
        rows_a, rows_b = {"forward": ((m, k), (n, k)), "dgrad": ((m, k), (k, n)), "wgrad": ((k, m), (k, n))}[kind]
        trans_a, trans_b = kind == "wgrad", kind == "forward"
        fast = dtype == "fp8" and kind == "forward"
        bare_bias = bias.torch if bias else None
        if dtype == "bf16":
            a, b = plain(*rows_a), plain(*rows_b)
            bare = (a.torch, b.torch, d.torch, bare_bias, trans_a, trans_b, fast, None, None)
        else:
            if dtype == "fp8":
                a, b = fp8(*rows_a, dtype=E4M3 if kind == "forward" else E5M2), fp8(*rows_b)
                modes = None
            else:
                a = fp8(*rows_a, scaling=BLOCK_1X128)
                b = fp8(*rows_b, scaling=BLOCK_1X128 if kind == "wgrad" else BLOCK_128X128)
                modes = (VEC128, VEC128 if kind == "wgrad" else BLOCK128)
            # Selects for each FP8 operand the row-wise or column-wise data whose rows run along the contraction dimension.
            raw_a, scale_a = (a.keep[0], a.keep[2]) if trans_a else (a.torch, a.keep[1])
            raw_b, scale_b = (b.torch, b.keep[1]) if trans_b else (b.keep[0], b.keep[2])
            bare = (raw_a, raw_b, d.torch, bare_bias, False, True, fast, (scale_a, scale_b), modes)
        call = OpCall(library, "generic_gemm", a=a, b=b, d=d, trans_a=trans_a, trans_b=trans_b,
                    use_split_accumulator=dtype == "block" or kind != "forward", **extra)
        pairs.append((call, bare))
    return pairs, 2.0 * m * n * k


def joined(library, kind, recipe):
    """Returns the MLP's GEMMs with GELU: te-fl's fused call, and its separate calls of GEMM and GELU. recipe: "bf16", "fp8" (scales are given) or
    "fp8 current" (the output's scale comes from its own amax)."""
    m, n, k = TOKENS, PRODUCTS["fc1"][0], PRODUCTS["fc1"][1]
    forward = kind == "forward"
    is_fp8, dtype = recipe != "bf16", E4M3 if forward else E5M2
    a = fp8(m, k, dtype=dtype) if is_fp8 else plain(m, k)
    rows_b = (n, k) if forward else (k, n)
    b = fp8(*rows_b) if is_fp8 else plain(*rows_b, std=0.02)
    out = fp8(m, n, dtype=dtype, flags=COMPUTE_SCALE if recipe == "fp8 current" else 0) if is_fp8 else plain(m, n)
    before, bias = plain(m, n), plain(n)
    def product(**more):
        return OpCall(library, "generic_gemm", a=a, b=b, trans_b=forward, use_split_accumulator=not forward, **more)
    if forward:
        return (product(d=out, bias=bias, gelu=True, pre_gelu_out=before),
                [product(d=before, bias=bias), OpCall(library, "gelu", input=before, output=out)])
    gradient = plain(m, n)
    return (product(d=out, pre_gelu_in=before, d_sum=bias),
            [product(d=gradient), OpCall(library, "dbias_dgelu", grad=gradient, input=before, output=out, dbias=bias)])


# ---- attention alone

def cudnn_attention(q, k, v, d_o, causal, scale, bias=None, dropout=0.0):
    """Runs cuDNN's attention forward and backward through PyTorch on [batch, heads, sequence, dim]; computes no gradient of the bias."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    saved = op(q, k, v, bias, True, dropout, causal, False, scale=scale)
    def forward():
        op(q, k, v, bias, True, dropout, causal, False, scale=scale)
    def backward():
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            d_o, q, k, v, saved[0], saved[1], saved[6], saved[7], bias, saved[2], saved[3], saved[4], saved[5], dropout, causal,
            scale=scale)
    return {"forward": forward, "backward": backward, "o": saved[0]}


def attention(library, shape):
    """Returns te-fl's forward and backward, cuDNN's through PyTorch on the same tensors, and the number of operations of the forward."""
    s, b, h = shape.sequence, shape.batch, shape.heads
    d = shape.hidden // h
    q, k, v, o, do, dq, dk, dv = (plain(s, b, h, d) for _ in range(8))
    lse = plain(b, h, s, dtype=F32)
    common = dict(q=q, k=k, v=v, o=o, softmax_lse=lse, layout=0, mask_type=1 if shape.causal else 0, scale=d ** -0.5)
    forward = OpCall(library, "fused_attn_fwd", **common)
    backward = OpCall(library, "fused_attn_bwd", d_o=do, dq=dq, dk=dk, dv=dv, **common)
    tq, tk, tv, tdo = (t.torch.permute(1, 2, 0, 3) for t in (q, k, v, do))
    bare = cudnn_attention(tq, tk, tv, tdo, shape.causal, d ** -0.5)
    def deterministic_backward():
        library.deterministic(True)
        try:
            backward()
        finally:
            library.deterministic(False)
    forward()
    def bits():
        deterministic_backward()
        return [t.torch.clone() for t in (dq, dk, dv)]
    first = bits()
    if not all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, bits())):
        raise RuntimeError("the deterministic backward gave other bits when it ran again")
    flops = 4.0 * b * h * s * s * d / (2 if shape.causal else 1)
    return {"forward": (forward, bare["forward"]), "backward": (backward, bare["backward"]),
            "backward deterministic": (deterministic_backward, bare["backward"])}, flops


def attention_fp8(library, shape):
    """Returns te-fl's FP8 forward and backward with the previous step's scales; cuDNN's in BF16 through PyTorch on the same values; the largest
    relative difference ||a - b|| / ||b|| of each; and the number of operations of the forward."""
    s, b, h = shape.sequence, shape.batch, shape.heads
    d = shape.hidden // h
    raw = [torch.randn(s, b, h, d, device="cuda", dtype=BF16) for _ in range(4)]
    q, k, v = (quantised(t, E4M3) for t in raw[:3])
    d_o = quantised(raw[3] * 0.1, E5M2)
    o = quantised(raw[0], E4M3, empty=True)
    dq, dk, dv = (quantised(t, E5M2, empty=True) for t in raw[:3])
    one = torch.zeros(1, device="cuda", dtype=BF16)
    p, ds = quantised(one, E4M3, empty=True), quantised(one, E5M2, empty=True)
    lse = plain(b, h, s, dtype=F32)
    common = dict(q=q, k=k, v=v, o=o, softmax_lse=lse, s_quant=p, layout=0, mask_type=1 if shape.causal else 0,
                  scale=d ** -0.5)
    forward = OpCall(library, "fused_attn_fwd", **common)
    backward = OpCall(library, "fused_attn_bwd", d_o=d_o, dq=dq, dk=dk, dv=dv, dp_quant=ds, **common)
    for call, outputs in ((forward, (p, o)), (backward, (ds, dq, dk, dv))):
        for _ in range(2):
            call()
            for t in outputs:
                rescale(t)
        call()
    tq, tk, tv, tdo = (t.permute(1, 2, 0, 3) for t in (raw[0], raw[1], raw[2], raw[3] * 0.1))
    bare = cudnn_attention(tq, tk, tv, tdo, shape.causal, d ** -0.5)
    torch_forward, torch_backward = bare["forward"], bare["backward"]
    def error(ours, theirs):
        theirs = theirs.permute(2, 0, 1, 3).float()
        return ((numbers(ours) - theirs).norm() / theirs.norm()).item()
    errors = {"forward": error(o, bare["o"]),
              "backward": max(error(*pair) for pair in zip((dq, dk, dv), torch_backward()))}
    errors["both"] = max(errors.values())
    def both(first, second):
        return lambda: (first(), second())
    flops = 4.0 * b * h * s * s * d / (2 if shape.causal else 1)
    return {"forward": (forward, torch_forward), "backward": (backward, torch_backward),
            "both": (both(forward, backward), both(torch_forward, torch_backward))}, errors, flops
