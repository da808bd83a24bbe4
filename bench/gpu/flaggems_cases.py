"""Draws arguments for the ops that te_fl.flaggems registers, and compares its results with those of reference.host."""

import torch

import te_fl

SCALE = 0.3
# The largest difference in units of the largest result, by the dtype of the result. A product is as far off as the order of its sums makes it.
NEAR = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def _activation(op, normal, rows, columns):
    gated = op.endswith("glu")
    width = 2 * columns if gated else columns
    arguments, backward = {"input": normal(rows, width) * 3}, "_d" in op or op.startswith("d")
    if backward:
        arguments["grad"] = normal(rows, columns)
    if op.startswith("scaled_"):
        arguments["act_scales"] = normal(rows)
    results = {"output": (rows, width if backward else columns)}
    if op.startswith("dbias_"):
        results["dbias"] = (columns,)
    if op.startswith("scaled_") and backward:
        results["grad_scales"] = (rows,)
    return arguments, results


def _norm(op, normal, rows, columns):
    x, gamma = normal(rows, columns) * 2 + 0.5, normal(columns) * 0.1 + 1
    layer, arguments = op.startswith("layernorm"), {"x": x, "gamma": gamma}
    mean = x.float().mean(-1) if layer else torch.zeros(rows)
    statistics = {"rsigma": ((x.float() - mean[:, None]).square().mean(-1) + 1e-5).rsqrt(), **({"mu": mean} if layer else {})}
    if op.endswith("_fwd"):
        return {**arguments, **({"beta": normal(columns)} if layer else {})}, {"z": (rows, columns), **{name: (rows,) for name in statistics}}
    results = {"dx": (rows, columns), "dgamma": (columns,), **({"dbeta": (columns,)} if layer else {})}
    return {**arguments, **statistics, "dz": normal(rows, columns), **({"add": normal(rows, columns)} if op.endswith("_add") else {})}, results


def _softmax(op, normal, rows, columns):
    shape = (2, rows, columns) if "causal" in op else (2, rows, rows) if "triang" in op else (1, 2, rows, columns)
    if "causal" in op:
        shape = (1, *shape)
    if op.endswith("_backward"):
        scores = normal(*shape).float()
        if "triang" in op or "causal" in op:  # the probabilities of hidden scores are 0
            hidden = torch.ones(shape[-2:], dtype=torch.bool).triu(1 + (shape[-1] - shape[-2] if "causal" in op else 0))
            scores = scores.masked_fill(hidden, -torch.inf)
        results = torch.softmax(scores, -1).nan_to_num(0.0).to(normal(1).dtype)
        return {"output_grad": normal(*shape), "softmax_results": results, "scale": SCALE}, {"input_grad": shape}
    masks = {"mask": normal(1, 1, *shape[-2:]) > 1} if "scaled_masked" in op else {}
    return {"input": normal(*shape) * 3, **masks, "scale": SCALE}, {"output": shape}


def _product(op, normal, rows, columns):
    inner = columns + 8
    a, b = normal(rows, inner), normal(columns, inner) * inner ** -0.5
    if op == "grouped_gemm":
        return {"a": [a, a[:rows // 2]], "b": [b, b], "trans_b": True}, {"d": [(rows, columns), (rows // 2, columns)]}
    return {"a": a, "b": b, "trans_b": True, "bias": normal(columns)}, {"d": (rows, columns)}


def _rope(op, normal, rows, columns):
    width = 2 * columns
    angles = torch.randn(rows, 1, 1, width) * 3
    if "qkv" not in op:
        return {"input": normal(rows, 2, 3, width), "freqs": angles}, {"output": (rows, 2, 3, width)}
    sizes = {"q_dim": 2 * width, "k_dim": width, "v_dim": width}
    parts = {"q": (rows, 2, 2, width), "k": (rows, 2, 1, width), "v": (rows, 2, 1, width)}
    freqs = {"q_freqs": angles, "k_freqs": angles, **sizes}
    if op.endswith("forward"):
        return {"qkv_input": normal(rows, 2, 1, 4 * width), **freqs}, {f"{name}_out": shape for name, shape in parts.items()}
    return {**{f"{name}_grad": normal(*shape) for name, shape in parts.items()}, **freqs}, {"qkv_grad": (rows, 2, 1, 4 * width)}


def _attention(op, normal, rows, columns):
    size = max(16, columns // 16 * 16) if columns < 64 else 64
    q, k, v = normal(rows, 2, 4, size), normal(rows, 2, 2, size), normal(rows, 2, 2, size)
    return {"q": q, "k": k, "v": v, "mask_type": "causal", "scale": size ** -0.5}, {"o": (rows, 2, 4, size), "softmax_lse": (2, 4, rows)}


def _sum(op, normal, rows, columns):
    return {"a": normal(rows, columns), "b": normal(rows, columns)}, {"output": (rows, columns)}


_FAMILIES = (("attn", _attention), ("rope", _rope), ("gemm", _product), ("softmax", _softmax), ("norm", _norm), ("add", _sum), ("", _activation))
_FP32 = ("mu", "rsigma", "softmax_lse")  # results that are FP32 whatever the operands are


def draw(op, dtype, rows, columns, seed=0):
    """Arguments on the host, and the shape and dtype of each result."""
    torch.manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape).to(dtype)  # noqa: E731
    arguments, shapes = next(family for part, family in _FAMILIES if part in op)(op, normal, rows, columns)
    return arguments, {name: (shape, torch.float32 if name in _FP32 else dtype) for name, shape in shapes.items()}


def _put(x, device, strided):
    """The tensor on the device; strided: as columns of a tensor twice as wide."""
    if isinstance(x, list):
        return [_put(t, device, strided) for t in x]
    if not isinstance(x, torch.Tensor):
        return x
    if not strided or x.dim() < 2:
        return x.to(device)
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=device)
    wide[..., :x.shape[-1]] = x.to(device)
    return wide[..., :x.shape[-1]]


def place(arguments, results, device, strided=False):
    """All arguments of the op on the device, results filled with NaN."""
    empty = {}
    for name, (shape, dtype) in results.items():
        make = lambda s: torch.full(s, float("nan"), dtype=dtype)  # noqa: E731
        empty[name] = [make(s) for s in shape] if isinstance(shape, list) else make(shape)
    return {name: _put(x, device, strided) for name, x in {**arguments, **empty}.items()}


def run(op, impl_id, arguments):
    with te_fl.policy(per_op={op: [f"impl:{impl_id}"]}):
        getattr(te_fl.ops, op)(**arguments)


def far_off(op, arguments, results, impl_id, device, strided=False):
    """Runs the op by an implementation on the device and by reference.host; returns the worst difference in units of what is allowed, and of which
    result.
    """
    mine, theirs = place(arguments, results, device, strided), place(arguments, results, "cpu")
    run(op, impl_id, mine)
    run(op, "reference.host", theirs)
    worst = (0.0, "")
    for name in results:
        for got, right in zip(*((x[name] if isinstance(x[name], list) else [x[name]]) for x in (mine, theirs))):
            got, exact = got.cpu().double(), right.double()
            near = NEAR[right.dtype] * max(1.0, float(exact.abs().nan_to_num(0.0, 0.0, 0.0).max()))
            difference = (got - exact).abs()
            difference[(got == exact) | (got.isnan() & exact.isnan())] = 0
            worst = max(worst, (float(difference.nan_to_num(float("inf")).max()) / near, name))
    return worst
