"""The single ops that are measured: what each is, the bytes that it must move, its target."""

from dataclasses import dataclass, field
from typing import Callable, Optional

import torch

from te_fl_bench import BLOCK_128X128, BLOCK_1X128, COMPUTE_SCALE, POW2_SCALE, TENSOR, Call, fp8, plain

BF16, F32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
TOKENS, HIDDEN, FFN, HEADS = 8192, 4096, 16384, 32


@dataclass
class Case:
    name: str
    build: Callable  # library -> (closure, bytes that must move)
    target: Optional[float] = None  # share of a copy's bandwidth
    note: str = ""  # what the peers reach
    peer: Optional[Callable] = None  # -> closure in PyTorch
    tags: tuple = field(default_factory=tuple)


def call(op, **arguments):
    """A case's builder from functions that make tensors; counts the tensors' bytes once each."""
    def build(library):
        made = {k: v() if callable(v) else v for k, v in arguments.items()}
        moved = 0
        for value in made.values():
            for t in value if isinstance(value, list) else [value]:
                moved += t.bytes() if hasattr(t, "bytes") else 0
        return Call(library, op, **made), moved
    return build


def t(*shape, dtype=BF16):
    return lambda: plain(*shape, dtype=dtype)


def q(rows, cols, dtype=E4M3, columnwise=True, scaling=TENSOR, flags=0):
    return lambda: fp8(rows, cols, dtype, columnwise, scaling, flags)


def norms():
    row = [("z", t(TOKENS, HIDDEN))]
    stats = dict(mu=t(TOKENS, dtype=F32), rsigma=t(TOKENS, dtype=F32))
    forward = dict(x=t(TOKENS, HIDDEN), gamma=t(HIDDEN), beta=t(HIDDEN), **stats)
    def torch_norm():
        x, w, b = (torch.randn(*s, device="cuda", dtype=BF16) for s in ((TOKENS, HIDDEN), (HIDDEN,), (HIDDEN,)))
        return lambda: torch.nn.functional.layer_norm(x, (HIDDEN,), w, b)
    rms = dict(x=t(TOKENS, HIDDEN), gamma=t(HIDDEN), rsigma=t(TOKENS, dtype=F32))
    back = dict(dz=t(TOKENS, HIDDEN), x=t(TOKENS, HIDDEN), gamma=t(HIDDEN), rsigma=t(TOKENS, dtype=F32),
                dx=t(TOKENS, HIDDEN), dgamma=t(HIDDEN))
    return [
        Case("layernorm_fwd bf16", call("layernorm_fwd", **forward, **dict(row)), 0.90, "TE 54 us", torch_norm),
        Case("layernorm_fwd -> fp8 row+col", call("layernorm_fwd", z=q(TOKENS, HIDDEN), **forward), 0.75, "TE 76 us"),
        Case("layernorm_fwd -> fp8 row", call("layernorm_fwd", z=q(TOKENS, HIDDEN, columnwise=False), **forward), 0.75),
        Case("layernorm_fwd -> fp8 row+col current",
             call("layernorm_fwd", z=q(TOKENS, HIDDEN, flags=COMPUTE_SCALE), **forward)),
        Case("layernorm_fwd -> fp8 row+col 1x128",
             call("layernorm_fwd", z=q(TOKENS, HIDDEN, scaling=BLOCK_1X128, flags=POW2_SCALE), **forward)),
        Case("layernorm_bwd bf16", call("layernorm_bwd", mu=t(TOKENS, dtype=F32), dbeta=t(HIDDEN), **back), 0.85,
             "TE 85 us"),
        Case("rmsnorm_fwd bf16", call("rmsnorm_fwd", **rms, **dict(row)), 0.90),
        Case("rmsnorm_fwd -> fp8 row+col", call("rmsnorm_fwd", z=q(TOKENS, HIDDEN), **rms), 0.75),
        Case("rmsnorm_bwd bf16", call("rmsnorm_bwd", **back), 0.85),
        Case("rmsnorm_bwd_add bf16", call("rmsnorm_bwd_add", add=t(TOKENS, HIDDEN), **back), 0.85),
    ]


def quantisation():
    cases = []
    for cols in (HIDDEN, 3 * HIDDEN):
        cases.append(Case(f"quantize row+col 8192x{cols}", call("quantize", input=t(TOKENS, cols), output=q(TOKENS, cols)),
                          0.85, "TE 51 us" if cols == HIDDEN else ""))
        cases.append(Case(f"bgrad_quantize row+col 8192x{cols}",
                          call("bgrad_quantize", input=t(TOKENS, cols), output=q(TOKENS, cols, E5M2), bias_grad=t(cols)),
                          0.85))
    modes = [("current", TENSOR, COMPUTE_SCALE, E4M3), ("1x128", BLOCK_1X128, POW2_SCALE, E4M3),
             ("128x128", BLOCK_128X128, POW2_SCALE, E4M3)]
    for name, scaling, flags, dtype in modes:
        cases.append(Case(f"quantize row+col {name} 8192x4096",
                          call("quantize", input=t(TOKENS, HIDDEN), output=q(TOKENS, HIDDEN, dtype, True, scaling, flags))))
    cases.append(Case("quantize row 8192x4096", call("quantize", input=t(TOKENS, HIDDEN),
                                                     output=q(TOKENS, HIDDEN, columnwise=False)), 0.85))
    cases.append(Case("quantize f32 weight row+col 16384x4096",
                      call("quantize", input=t(FFN, HIDDEN, dtype=F32), output=q(FFN, HIDDEN)), 0.85))
    cases.append(Case("dequantize 8192x4096", call("dequantize", input=q(TOKENS, HIDDEN, columnwise=False),
                                                   output=t(TOKENS, HIDDEN)), 0.85))
    cases.append(Case("compute_amax 8192x4096", call("compute_amax", input=t(TOKENS, HIDDEN), amax=t(1, dtype=F32)), 0.85))
    return cases


def activations():
    wide = t(TOKENS, FFN)
    gated_rows, gated = 4096, 11008
    return [
        Case("gelu bf16 8192x16384", call("gelu", input=wide, output=wide), 0.90),
        Case("gelu -> fp8 row+col 8192x16384", call("gelu", input=wide, output=q(TOKENS, FFN)), 0.85, "TE 214 us"),
        Case("dbias_dgelu -> fp8 row+col 8192x16384",
             call("dbias_dgelu", grad=wide, input=wide, output=q(TOKENS, FFN, E5M2), dbias=t(FFN)), 0.85, "TE 324 us"),
        Case("dbias_dgelu bf16 8192x16384", call("dbias_dgelu", grad=wide, input=wide, output=wide, dbias=t(FFN)), 0.85),
        Case("swiglu -> fp8 row+col 4096x11008",
             call("swiglu", input=t(gated_rows, 2 * gated), output=q(gated_rows, gated)), 0.85),
        Case("dswiglu -> fp8 row+col 4096x11008",
             call("dswiglu", grad=t(gated_rows, gated), input=t(gated_rows, 2 * gated),
                  output=q(gated_rows, 2 * gated, E5M2)), 0.85),
    ]


def others():
    scores = t(4, HEADS, 1024, 1024)
    rope = t(2048, 4, HEADS, 128)
    freqs = t(2048, 1, 1, 128, dtype=F32)
    n = 64 << 20
    adam = dict(grads=lambda: [plain(n, dtype=F32)], params=lambda: [plain(n)], exp_avgs=lambda: [plain(n, dtype=F32)],
                exp_avg_sqs=lambda: [plain(n, dtype=F32, std=0)], master_params=lambda: [plain(n, dtype=F32)], lr=1e-4)
    def build_adam(library):
        closure, moved = call("multi_tensor_adam", **adam)(library)
        return closure, moved + 3 * n * 4  # moments and master weights are read and written
    def build_scale_update(library):
        sites = 12
        histories = [plain(1024, 1, dtype=F32) for _ in range(sites)]
        scales = [plain(1, dtype=F32) for _ in range(sites)]
        return Call(library, "fused_amax_and_scale_update_after_reduction", amax_histories=histories, scales=scales,
                    algo=0, fp8_dtype=0, margin=0.0), sites * 1024 * 8
    return [
        Case("scaled_softmax_forward 4x32x1024x1024",
             call("scaled_softmax_forward", input=scores, output=scores, scale=0.125), 0.90),
        Case("scaled_softmax_backward 4x32x1024x1024",
             call("scaled_softmax_backward", output_grad=scores, softmax_results=scores, input_grad=scores, scale=0.125), 0.90),
        Case("fused_rope_forward 2048x4x32x128", call("fused_rope_forward", input=rope, output=rope, freqs=freqs), 0.90),
        Case("dropout_fwd 8192x4096", call("dropout_fwd", input=t(TOKENS, HIDDEN), output=t(TOKENS, HIDDEN),
                                           mask=t(TOKENS * HIDDEN // 8, dtype=torch.uint8), p=0.1), 0.90),
        Case("add 8192x4096", call("add", a=t(TOKENS, HIDDEN), b=t(TOKENS, HIDDEN), output=t(TOKENS, HIDDEN)), 0.90),
        Case("multi_tensor_adam 64M", build_adam, 0.90),
        Case("scale update, 12 sites x 1024", build_scale_update, None, "TE 6 to 7 us", tags=("latency",)),
    ]


def op_cases():
    return norms() + quantisation() + activations() + others()
