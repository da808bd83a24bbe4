"""Transformer Engine's modules written in plain PyTorch, for FP64, and quantisation in NumPy, for the tests of te_fl.pytorch."""

import math

import numpy as np
import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 1e-5 if DEVICES == ["cpu"] else 1e-4, torch.bfloat16: 3e-2}  # relative to the largest value


def randn(*shape, seed=1, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def randomise(module, seed=7):
    """Gives all parameters distinct values, so that confusing two of them fails a test."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            values = torch.randn(p.shape, generator=generator)
            if p.dim() > 1:
                values = values / math.sqrt(p.shape[-1])
            elif name.endswith("weight") and not getattr(module, "zero_centered", False):
                values = 1 + 0.2 * values
            else:
                values = 0.2 * values
            p.copy_(values)
    return module


def compare(test, served, module, oracle, inputs, tolerance=None, seed=11, close=None):
    """Compares outputs of served(*inputs), and the gradients of inputs and parameters, with those of oracle(parameters, *inputs) in FP64."""
    close = close or near
    own = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    parameters = dict(module.named_parameters())
    exact_parameters = {n: p.detach().double().requires_grad_(p.requires_grad) for n, p in parameters.items()}
    module.zero_grad(set_to_none=True)
    got, want = served(*own), oracle(exact_parameters, *exact)
    got, want = (o if isinstance(o, (tuple, list)) else (o,) for o in (got, want))
    test.assertEqual(len(got), len(want))
    grads = [randn(*w.shape, seed=seed + i, device=w.device).to(g.dtype) for i, (g, w) in enumerate(zip(got, want))]
    for i, (g, w) in enumerate(zip(got, want)):
        test.assertEqual(g.shape, w.shape)
        close(test, g, w, tolerance or TOLERANCE[own[0].dtype], f"output {i}")
    torch.autograd.backward(got, grads)
    torch.autograd.backward(want, [g.double() for g in grads])
    pairs = [(f"input {i}", a, b) for i, (a, b) in enumerate(zip(own, exact))]
    pairs += [(n, p, exact_parameters[n]) for n, p in parameters.items()]
    largest = max(b.grad.abs().max().item() for _, _, b in pairs if b.grad is not None)
    for name, a, b in pairs:
        if b.grad is None:
            test.assertIsNone(a.grad, f"{name} has a gradient, and none in the oracle")
            continue
        test.assertIsNotNone(a.grad, f"{name} has no gradient")
        test.assertEqual(a.grad.dtype, a.dtype, name)
        close(test, a.grad, b.grad, 2 * (tolerance or TOLERANCE[own[0].dtype]), f"gradient of {name}", 0.1 * largest)
    return got


def near(test, got, want, tolerance, what, least=0.0):
    scale = max(want.abs().max().item(), least)
    error = (got.double() - want.double()).abs().max().item() / scale
    test.assertLess(error, tolerance, f"{what} is off by {error:.3g} of {scale:.3g}")


def near_by_norm(test, got, want, tolerance, what, least=0.0):
    scale = max(want.norm().item(), least * want.numel() ** 0.5)
    error = (got.double() - want.double()).norm().item() / scale
    test.assertLess(error, tolerance, f"{what} is off by {error:.3g} of {scale:.3g} (2-norm)")


# -- parts of modules

def linear(x, w, b=None):
    y = x @ w.T
    return y if b is None else y + b


def norm(x, p, prefix, kind="LayerNorm", eps=1e-5, zero_centered=False, dims=1):
    gamma = p[prefix + "weight"] + (1 if zero_centered else 0)
    over = tuple(range(-dims, 0))
    if kind == "RMSNorm":
        return x / torch.sqrt((x * x).mean(over, keepdim=True) + eps) * gamma
    centred = x - x.mean(over, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(over, keepdim=True) + eps) * gamma + p[prefix + "bias"]


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


PLAIN = {
    "gelu": gelu, "qgelu": lambda x: x * torch.sigmoid(1.702 * x), "relu": lambda x: x.clamp(min=0), "srelu": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x * torch.sigmoid(x), "glu": torch.sigmoid,
}
GATED = {"geglu": "gelu", "glu": "glu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
ACTIVATIONS = ["gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu", "clamped_swiglu"]


def activate(x, name, limit=7.0, alpha=1.702):
    if name == "clamped_swiglu":
        a, b = x.chunk(2, -1)
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
        return a * torch.sigmoid(alpha * a) * (b + 1)
    if name in GATED:
        a, b = x.chunk(2, -1)
        return PLAIN[GATED[name]](a) * b
    return PLAIN[name](x)


def allowed(queries, keys, causal=False, bottom_right=False, window=(-1, -1)):
    """Returns a mask [queries, keys], true where a query sees a key."""
    shift = keys - queries if bottom_right else 0
    distance = torch.arange(keys)[None, :] - (torch.arange(queries)[:, None] + shift)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if window[0] >= 0:
        seen &= distance >= -window[0]
    if window[1] >= 0:
        seen &= distance <= window[1]
    return seen


def compute_scores(q, k, seen=None, bias=None, scale=None, cap=0.0):
    """Returns scores [b, h, sq, sk] for q [b, sq, h, d] and k [b, sk, g, d]; `seen` broadcasts to that shape, and unseen keys score -1e30."""
    d, k = q.shape[-1], k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (1 / math.sqrt(d) if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias.to(scores.device)
    return scores if seen is None else scores.masked_fill(~seen.to(scores.device), -1e30)


def attention(q, k, v, seen=None, bias=None, scale=None, sink=None, cap=0.0):
    """Attention of q [b, sq, h, d] and k, v [b, sk, g, d] -> [b, sq, h * d]; `seen` broadcasts to [b, h, sq, sk]; a query that sees no key yields
    0."""
    b, sq, h, d = q.shape
    v = v.repeat_interleave(h // v.shape[2], 2)
    scores = compute_scores(q, k, seen, bias, scale, cap)
    top = scores.detach().amax(-1, keepdim=True).clamp(min=-1e20)
    e = torch.exp(scores - top)
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.view(1, -1, 1, 1) - top)
    out = torch.einsum("bhqk,bkhd->bqhd", e / torch.where(total == 0, 1, total), v)
    return out.reshape(b, sq, -1)


def rotate(x, angles, interleaved=False):
    """Applies RoPE to x [b, s, h, d] with angles [positions, 1, 1, r]."""
    f = angles[:x.shape[1], 0, 0].to(x)[None, :, None]
    r = f.shape[-1]
    t, rest = x[..., :r], x[..., r:]
    if interleaved:
        turned = torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2)
    else:
        turned = torch.cat([-t[..., r // 2:], t[..., :r // 2]], -1)
    return torch.cat([t * f.cos() + turned * f.sin(), rest], -1)


# -- modules

def mlp(p, x, prefix="", activation="gelu", kind="LayerNorm", zero_centered=False, product=linear, eps=1e-5, **params):
    """Returns the output without fc2's bias, that bias, and the normalised input."""
    h = norm(x, p, prefix + "layer_norm_", kind, eps, zero_centered)
    y = product(h, p[prefix + "fc1_weight"], p.get(prefix + "fc1_bias"))
    return product(activate(y, activation, **params), p[prefix + "fc2_weight"]), p.get(prefix + "fc2_bias"), h


def whole(p, prefix, name, parts):
    """Returns a parameter that is registered unsplit, or the concatenation of its parts."""
    if prefix + name in p:
        return p[prefix + name]
    found = [p[f"{prefix}{part}_{name}"] for part in parts if f"{prefix}{part}_{name}" in p]
    return torch.cat(found) if found else None


def multihead(p, x, prefix="", heads=4, groups=None, norms="LayerNorm", input_layernorm=False, encoder=None, interleaved=None, angles=None,
              rope_interleaved=False, qk_norm=None, norm_first=False, zero_centered=False, seen=None, bias=None, fmt="sbhd", product=linear,
              sink=None, eps=1e-5, cap=0.0):
    """Returns the output without proj's bias, that bias, and the normalised input."""
    groups, h = groups or heads, x
    turn = (lambda t: t.transpose(0, 1)) if fmt == "sbhd" else (lambda t: t)
    per_group = heads // groups
    if input_layernorm:
        place = "layernorm_query." if encoder is not None else "layernorm_qkv."
        h = norm(x, p, f"{prefix}{place}layer_norm_", norms, eps, zero_centered)
    elif encoder is not None:
        place = "query_layer."
    else:
        place = "qkv."

    def project(t, at, parts, shape, sizes, dim):
        y = product(t, whole(p, prefix + at, "weight", parts), whole(p, prefix + at, "bias", parts))
        y = turn(y).unflatten(-1, shape)
        return [z.flatten(-3, -2) for z in y.split(sizes, dim)]

    if encoder is None:
        d = whole(p, prefix + place, "weight", ("query", "key", "value")).shape[0] // (heads + 2 * groups)
        if interleaved:
            q, k, v = project(h, place, ("query", "key", "value"), (groups, per_group + 2, d), (per_group, 1, 1), -2)
        else:
            q, k, v = project(h, place, ("query", "key", "value"), (per_group + 2, groups, d), (per_group, 1, 1), -3)
    else:
        q = turn(product(h, whole(p, prefix + place, "weight", ("query",)), whole(p, prefix + place, "bias", ("query",))))
        q = q.unflatten(-1, (heads, -1))
        d = q.shape[-1]
        if interleaved:
            k, v = project(encoder, "key_value.", ("key", "value"), (groups, 2, d), (1, 1), -2)
        else:
            k, v = project(encoder, "key_value.", ("key", "value"), (2, groups, d), (1, 1), -3)

    def normalised(t, name):
        if qk_norm == "L2Normalization":
            return t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6)
        return norm(t, p, f"{prefix}{name}_norm.", qk_norm, 1e-6)

    if qk_norm and norm_first:
        q, k = normalised(q, "q"), normalised(k, "k")
    if angles is not None:
        of_q, of_k = angles if isinstance(angles, tuple) else (angles, angles)
        q, k = rotate(q, of_q, rope_interleaved), rotate(k, of_k, rope_interleaved)
    if qk_norm and not norm_first:
        q, k = normalised(q, "q"), normalised(k, "k")
    y = turn(attention(q, k, v, seen, bias, sink=sink, cap=cap))
    return product(y, p[prefix + "proj.weight"]), p.get(prefix + "proj.bias"), h


def with_bias(y, b):
    return y if b is None else y + b


def transformer(p, x, *, output_layernorm=False, post_residual=False, parallel=False, encoder=None, activation="gelu", norms="LayerNorm",
                zero_centered=False, product=linear, seen=None, seen_encoder=None, heads=4, groups=None, interleaved=None, **options):
    shared = dict(heads=heads, groups=groups, norms=norms, zero_centered=zero_centered, product=product, interleaved=interleaved, **options)
    y, b, h = multihead(p, x, "self_attention.", input_layernorm=not output_layernorm, seen=seen, **shared)
    attended = with_bias(y, b)
    if parallel:
        m, c, _ = mlp(p, x, "layernorm_mlp.", activation, norms, zero_centered, product)
        return x + attended + with_bias(m, c)
    out = (h if post_residual else x) + attended
    if encoder is not None:
        y, b, h = multihead(p, out, "inter_attention.", input_layernorm=True, encoder=encoder, seen=seen_encoder, **shared)
        out = (h if post_residual else out) + with_bias(y, b)
    m, c, h = mlp(p, out, "layernorm_mlp.", activation, norms, zero_centered, product)
    out = (h if post_residual else out) + with_bias(m, c)
    return norm(out, p, "layernorm.", norms, 1e-5, zero_centered) if output_layernorm else out


# -- quantisation, by NumPy

FORMATS = {"e4m3": (448.0, 3, -6), "e5m2": (57344.0, 2, -14)}  # largest value, bits of the mantissa, smallest normal exponent


def round_to(values, form):
    """Rounds to the nearest value of the format, ties to even, saturating."""
    largest, bits, least = FORMATS[form]
    values = np.clip(np.asarray(values, np.float64), -largest, largest)
    exponent = np.maximum(np.frexp(values)[1] - 1, least)
    step = np.exp2(exponent - bits)
    return np.rint(values / step) * step


def compute_scale(amax, form, pow2=False, margin=0):
    amax = np.asarray(amax, np.float32)
    with np.errstate(divide="ignore"):
        scale = np.where(amax == 0, np.float32(1), np.float32(FORMATS[form][0]) * np.float32(2.0 ** -margin) / amax).astype(np.float32)
    return np.exp2(np.floor(np.log2(scale))).astype(np.float32) if pow2 else scale


def per_tensor(x, form, margin=0, pow2=False):
    """Quantises x with one scale; returns the dequantised values."""
    values = x.detach().cpu().numpy().astype(np.float32)
    scale = compute_scale(np.abs(values).max(), form, pow2, margin)
    codes = round_to((values * scale).astype(np.float32), form)
    return torch.from_numpy(codes * np.float64(np.float32(1) / scale)).to(x.device)


def per_block(x, rows, columns, form="e4m3"):
    """Quantises x [m, n] in blocks of rows x columns with power-of-two scales; returns the dequantised values."""
    values = x.detach().cpu().numpy().astype(np.float32)
    out = np.empty(values.shape, np.float64)
    for i in range(0, values.shape[0], rows):
        for j in range(0, values.shape[1], columns):
            block = values[i:i + rows, j:j + columns]
            scale = compute_scale(np.abs(block).max(), form, True)
            out[i:i + rows, j:j + columns] = round_to(block * scale, form) / np.float64(scale)
    return torch.from_numpy(out).to(x.device)


class _Quantised(torch.autograd.Function):
    """y = x w^T, with quantised operands in each of the three GEMMs (forward, data gradient, weight gradient)."""

    @staticmethod
    def forward(ctx, x, w, recipe):
        ctx.recipe, ctx.shape = recipe, x.shape
        x = x.reshape(-1, x.shape[-1])
        ctx.kept = x, w
        return (recipe.rows(x) @ recipe.weight(w).T).reshape(*ctx.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        recipe, (x, w) = ctx.recipe, ctx.kept
        dy = dy.reshape(-1, dy.shape[-1])
        return (recipe.grad_rows(dy) @ recipe.weight(w)).reshape(ctx.shape), recipe.grad_columns(dy).T @ recipe.columns(x), None


class PerTensor:
    def __init__(self, margin=0, gradient="e5m2", pow2=False):
        self.rows = self.columns = self.weight = lambda t: per_tensor(t, "e4m3", margin, pow2)
        self.grad_rows = self.grad_columns = lambda t: per_tensor(t, gradient, margin, pow2)

    def __call__(self, x, w, b=None):
        return with_bias(_Quantised.apply(x, w, self), b)


class PerBlock(PerTensor):
    def __init__(self, gradient="e4m3"):
        self.rows = lambda t: per_block(t, 1, 128)
        self.columns = lambda t: per_block(t, 128, 1)
        self.grad_rows = lambda t: per_block(t, 1, 128, gradient)
        self.grad_columns = lambda t: per_block(t, 128, 1, gradient)
        self.weight = lambda t: per_block(t, 128, 128)
