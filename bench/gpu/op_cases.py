"""The single ops to measure: each op's call, the bytes that it must move, and its target."""

from dataclasses import dataclass, field
from typing import Callable, Optional

import torch

from te_fl_bench import BLOCK_128X128, BLOCK_1X128, COMPUTE_SCALE, MXFP8, POW2_SCALE, TENSOR, OpCall, Tensor, fp8, plain

BF16, F32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
TOKENS, HIDDEN, FFN, HEADS = 8192, 4096, 16384, 32


@dataclass
class Case:
    name: str
    build: Callable  # library -> (closure, bytes that the call must move)
    target: Optional[float] = None  # target as a fraction of copy bandwidth
    peer: Optional[Callable] = None  # returns the closure that does the same in PyTorch
    tags: tuple = field(default_factory=tuple)


def call(op, **arguments):
    """Returns a case's builder. `arguments` are functions that make tensors; each tensor's bytes count once."""
    def build(library):
        made = {k: v() if callable(v) else v for k, v in arguments.items()}
        moved = 0
        for value in made.values():
            for t in value if isinstance(value, list) else [value]:
                moved += t.bytes() if hasattr(t, "bytes") else 0
        return OpCall(library, op, **made), moved
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
        Case("layernorm_fwd bf16", call("layernorm_fwd", **forward, **dict(row)), 0.90, torch_norm),
        Case("layernorm_fwd -> fp8 row+col", call("layernorm_fwd", z=q(TOKENS, HIDDEN), **forward), 0.75),
        Case("layernorm_fwd -> fp8 row", call("layernorm_fwd", z=q(TOKENS, HIDDEN, columnwise=False), **forward), 0.75),
        Case("layernorm_fwd -> fp8 row+col current",
             call("layernorm_fwd", z=q(TOKENS, HIDDEN, flags=COMPUTE_SCALE), **forward)),
        Case("layernorm_fwd -> fp8 row+col 1x128",
             call("layernorm_fwd", z=q(TOKENS, HIDDEN, scaling=BLOCK_1X128, flags=POW2_SCALE), **forward)),
        Case("layernorm_bwd bf16", call("layernorm_bwd", mu=t(TOKENS, dtype=F32), dbeta=t(HIDDEN), **back), 0.85),
        Case("rmsnorm_fwd bf16", call("rmsnorm_fwd", **rms, **dict(row)), 0.90),
        Case("rmsnorm_fwd -> fp8 row+col", call("rmsnorm_fwd", z=q(TOKENS, HIDDEN), **rms), 0.75),
        Case("rmsnorm_bwd bf16", call("rmsnorm_bwd", **back), 0.85),
        Case("rmsnorm_bwd_add bf16", call("rmsnorm_bwd_add", add=t(TOKENS, HIDDEN), **back), 0.85),
    ]


def quantisation():
    cases = []
    for cols in (HIDDEN, 3 * HIDDEN):
        cases.append(Case(f"quantize row+col 8192x{cols}", call("quantize", input=t(TOKENS, cols), output=q(TOKENS, cols)),
                          0.85))
        cases.append(Case(f"bgrad_quantize row+col 8192x{cols}",
                          call("bgrad_quantize", input=t(TOKENS, cols), output=q(TOKENS, cols, E5M2), bias_grad=t(cols)),
                          0.85))
    modes = [("current", TENSOR, COMPUTE_SCALE, E4M3), ("1x128", BLOCK_1X128, POW2_SCALE, E4M3),
             ("128x128", BLOCK_128X128, POW2_SCALE, E4M3), ("mxfp8", MXFP8, 0, E4M3)]
    for name, scaling, flags, dtype in modes:
        cases.append(Case(f"quantize row+col {name} 8192x4096",
                          call("quantize", input=t(TOKENS, HIDDEN), output=q(TOKENS, HIDDEN, dtype, True, scaling, flags))))
    cases.append(Case("quantize f16 row+col mxfp8 8192x4096",
                      call("quantize", input=t(TOKENS, HIDDEN, dtype=torch.float16), output=q(TOKENS, HIDDEN, scaling=MXFP8))))
    cases.append(Case("quantize f32 weight row+col mxfp8 16384x4096",
                      call("quantize", input=t(FFN, HIDDEN, dtype=F32), output=q(FFN, HIDDEN, scaling=MXFP8))))
    cases.append(Case("quantize row mxfp8 8192x4096",
                      call("quantize", input=t(TOKENS, HIDDEN), output=q(TOKENS, HIDDEN, columnwise=False, scaling=MXFP8))))
    cases.append(Case("dequantize mxfp8 8192x4096", call("dequantize", input=q(TOKENS, HIDDEN, columnwise=False, scaling=MXFP8),
                                                         output=t(TOKENS, HIDDEN))))
    cases.append(Case("bgrad_quantize row+col mxfp8 8192x12288",
                      call("bgrad_quantize", input=t(TOKENS, 3 * HIDDEN), bias_grad=t(3 * HIDDEN),
                           output=q(TOKENS, 3 * HIDDEN, scaling=MXFP8))))
    for cols in (HIDDEN, 3 * HIDDEN):
        cases.append(Case(f"bgrad_quantize row+col 1x128 8192x{cols}",
                          call("bgrad_quantize", input=t(TOKENS, cols), bias_grad=t(cols),
                               output=q(TOKENS, cols, E4M3, True, BLOCK_1X128, POW2_SCALE))))
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
        Case("gelu -> fp8 row+col 8192x16384", call("gelu", input=wide, output=q(TOKENS, FFN)), 0.85),
        Case("dbias_dgelu -> fp8 row+col 8192x16384",
             call("dbias_dgelu", grad=wide, input=wide, output=q(TOKENS, FFN, E5M2), dbias=t(FFN)), 0.85),
        Case("gelu -> fp8 row+col 1x128 8192x16384",
             call("gelu", input=wide, output=q(TOKENS, FFN, E4M3, True, BLOCK_1X128, POW2_SCALE))),
        Case("dbias_dgelu -> fp8 row+col 1x128 8192x16384",
             call("dbias_dgelu", grad=wide, input=wide, output=q(TOKENS, FFN, E4M3, True, BLOCK_1X128, POW2_SCALE), dbias=t(FFN))),
        Case("dbias_dgelu bf16 8192x16384", call("dbias_dgelu", grad=wide, input=wide, output=wide, dbias=t(FFN)), 0.85),
        Case("swiglu -> fp8 row+col 4096x11008",
             call("swiglu", input=t(gated_rows, 2 * gated), output=q(gated_rows, gated)), 0.85),
        Case("dswiglu -> fp8 row+col 4096x11008",
             call("dswiglu", grad=t(gated_rows, gated), input=t(gated_rows, 2 * gated),
                  output=q(gated_rows, 2 * gated, E5M2)), 0.85),
    ]


def numbers(*shape, below):
    """Returns a function that makes a tensor of random integers below a bound: row indices, or class targets."""
    def make():
        made = plain(*shape, dtype=torch.int32)
        made.torch.random_(0, below)
        return made
    return make


def counted(build, share):
    """Wraps `build` for a case that must move only a share of its tensors' bytes."""
    def counting(library):
        closure, moved = build(library)
        return closure, int(moved * share)
    return counting


def softmax():
    shape = (4, HEADS, 1024, 1024)
    def forward(shape, **more):
        return dict(input=t(*shape), output=t(*shape), scale=0.125, **more)
    def backward(shape):
        return dict(output_grad=t(*shape), softmax_results=t(*shape), input_grad=t(*shape), scale=0.125)
    def mask():
        made = plain(4, 1, 1024, 1024, dtype=torch.uint8)
        made.torch.copy_(torch.rand_like(made.torch, dtype=torch.float32) < 0.3)
        return made
    square = (128, 1024, 1024)
    cases = [
        Case("scaled_softmax_forward 4x32x1024x1024", call("scaled_softmax_forward", **forward(shape)), 0.90),
        Case("scaled_softmax_backward 4x32x1024x1024", call("scaled_softmax_backward", **backward(shape)), 0.90),
        Case("scaled_masked_softmax_forward 4x32x1024x1024",
             call("scaled_masked_softmax_forward", **forward(shape, mask=mask)), 0.90),
        # Causal mask: the op reads half of the input and writes all of the output.
        Case("scaled_upper_triang_masked_softmax_forward 128x1024x1024",
             counted(call("scaled_upper_triang_masked_softmax_forward", **forward(square)), 3 / 4), 0.90),
        Case("scaled_upper_triang_masked_softmax_backward 128x1024x1024",
             counted(call("scaled_upper_triang_masked_softmax_backward", **backward(square)), 2 / 3), 0.90),
        Case("scaled_aligned_causal_masked_softmax_forward 4x32x1024x1024",
             counted(call("scaled_aligned_causal_masked_softmax_forward", **forward(shape)), 3 / 4), 0.90),
        Case("scaled_aligned_causal_masked_softmax_backward 4x32x1024x1024",
             counted(call("scaled_aligned_causal_masked_softmax_backward", **backward(shape)), 2 / 3), 0.90),
    ]
    for width in (64, 256, 512, 2048, 4096, 8192, 16384, 32768):
        many = (1, 1, (64 << 20) // width, width)
        cases.append(Case(f"scaled_softmax_forward rows of {width}", call("scaled_softmax_forward", **forward(many)), 0.90))
        if width >= 4096:
            cases.append(Case(f"scaled_softmax_backward rows of {width}", call("scaled_softmax_backward", **backward(many)), 0.90))
    cases.append(Case("scaled_softmax_forward f32 rows of 1024",
                      call("scaled_softmax_forward", input=t(1, 1, 65536, 1024, dtype=F32),
                           output=t(1, 1, 65536, 1024, dtype=F32), scale=0.125), 0.90))
    cases.append(Case("scaled_softmax_forward rows of 1023", call("scaled_softmax_forward", **forward((1, 1, 65536, 1023)))))
    return cases


def rope():
    x, grouped = t(2048, 4, HEADS, 128), t(2048, 4, 8, 128)
    def freqs():
        made = plain(2048, 1, 1, 128, dtype=F32)
        rates = 10000.0 ** (-torch.arange(64, device="cuda", dtype=torch.float64) / 64)
        angles = torch.arange(2048, device="cuda", dtype=torch.float64)[:, None] * rates
        made.torch.copy_(torch.cat([angles, angles], dim=1).view(2048, 1, 1, 128))
        return made
    def joined(groups, queries):
        return dict(q_freqs=freqs, k_freqs=freqs, q_dim=queries * 128, k_dim=128, v_dim=128,
                    **{"qkv": t(2048, 4, groups, (queries + 2) * 128), "q": t(2048, 4, groups * queries, 128),
                       "k": t(2048, 4, groups, 128), "v": t(2048, 4, groups, 128)})
    cases = []
    for way in ("forward", "backward"):
        cases.append(Case(f"fused_rope_{way} 2048x4x32x128", call(f"fused_rope_{way}", input=x, output=x, freqs=freqs), 0.90))
        for groups, queries in ((HEADS, 1), (8, 4)):
            made = joined(groups, queries)
            names = {"qkv": "qkv_input", "q": "q_out", "k": "k_out", "v": "v_out"} if way == "forward" else {
                "qkv": "qkv_grad", "q": "q_grad", "k": "k_grad", "v": "v_grad"}
            cases.append(Case(f"fused_qkv_rope_{way} 2048x4x{groups}x{queries + 2}x128",
                              call(f"fused_qkv_rope_{way}", **{names.get(k, k): v for k, v in made.items()}), 0.90))
    other = t(4, 2048, HEADS, 128)
    cases.append(Case("fused_rope_forward bshd interleaved 4x2048x32x128",
                      call("fused_rope_forward", input=other, output=other, freqs=freqs, layout=1, interleaved=1), 0.90))
    cases.append(Case("fused_rope_forward 2048x4x8x128", call("fused_rope_forward", input=grouped, output=grouped, freqs=freqs)))
    return cases


def dropping():
    x = t(TOKENS, HIDDEN)
    def mask():
        made = plain(TOKENS * HIDDEN // 8, dtype=torch.uint8)
        made.torch.random_()
        return made
    return [
        Case("dropout_fwd 8192x4096", call("dropout_fwd", input=x, output=x, mask=mask, p=0.1), 0.90),
        Case("dropout_bwd 8192x4096", call("dropout_bwd", grad_output=x, grad_input=x, mask=mask, p=0.1), 0.90),
        Case("add 8192x4096", call("add", a=x, b=x, output=x), 0.90),
        Case("add with dropout 8192x4096", call("add", a=x, b=x, output=x, mask=mask, p=0.1), 0.90),
    ]


def copies():
    def strided(shape, strides, dtype=BF16):
        def make():
            flat = plain(max(1, sum((n - 1) * s for n, s in zip(shape, strides)) + 1), dtype=dtype)
            return Tensor(torch.as_strided(flat.torch, shape, strides))
        return make
    x = t(TOKENS, HIDDEN)
    cases = [
        Case("strided_copy 8192x4096", call("strided_copy", input=x, output=x), 0.90),
        Case("strided_copy f32->bf16 16384x4096", call("strided_copy", input=t(FFN, HIDDEN, dtype=F32), output=t(FFN, HIDDEN)), 0.90),
        Case("strided_copy bf16->f32 16384x4096", call("strided_copy", input=t(FFN, HIDDEN), output=t(FFN, HIDDEN, dtype=F32)), 0.90),
        Case("strided_copy a third of 8192x12288", call("strided_copy", input=strided((TOKENS, HIDDEN), (3 * HIDDEN, 1)), output=x), 0.90),
        Case("strided_copy sbhd->bshd", call("strided_copy", input=strided((4, 2048, HEADS, 128), (4096, 16384, 128, 1)),
                                             output=t(4, 2048, HEADS, 128)), 0.90),
        Case("strided_copy bf16 transposed 8192x4096", call("strided_copy", input=strided((HIDDEN, TOKENS), (1, HIDDEN)),
                                                            output=t(HIDDEN, TOKENS)), 0.90),
        Case("strided_copy f32 transposed 8192x4096", call("strided_copy", input=strided((HIDDEN, TOKENS), (1, HIDDEN), F32),
                                                           output=t(HIDDEN, TOKENS, dtype=F32)), 0.90),
        Case("fill 8192x4096", call("fill", output=t(TOKENS, HIDDEN), value=1.5), 0.90),
        Case("fill f32 16384x4096", call("fill", output=t(FFN, HIDDEN, dtype=F32), value=0.0), 0.90),
    ]
    return cases


def tables():
    vocabulary = 32000
    row = t(TOKENS, dtype=F32)
    targets = numbers(TOKENS, below=vocabulary)
    def loss(width, dtype=BF16):
        x, name = t(TOKENS, width, dtype=dtype), f"8192x{width}" if dtype == BF16 else f"f32 8192x{width}"
        made = numbers(TOKENS, below=width)
        return [Case(f"cross_entropy_fwd {name}",
                     call("cross_entropy_fwd", logits=x, targets=made, loss=row, lse=row), 0.90),
                Case(f"cross_entropy_bwd {name}",
                     call("cross_entropy_bwd", grad_loss=row, logits=x, targets=made, lse=row, grad_logits=x), 0.90)]
    def looked_up(library):  # counts the bytes of the rows that are read, not of the whole embedding table
        made = dict(indices=targets(), weight=plain(vocabulary, HIDDEN), output=plain(TOKENS, HIDDEN))
        return OpCall(library, "embedding_fwd", **made), 2 * made["output"].bytes()
    return loss(vocabulary) + loss(50257) + loss(vocabulary, F32) + [
        Case("embedding_fwd 8192 of 32000x4096", looked_up, 0.90),
        Case("embedding_bwd 8192 of 32000x4096",
             call("embedding_bwd", indices=targets, grad_output=t(TOKENS, HIDDEN), grad_weight=t(vocabulary, HIDDEN)), 0.90),
    ]


def others():
    n = 64 << 20
    adam = dict(grads=lambda: [plain(n, dtype=F32)], params=lambda: [plain(n)], exp_avgs=lambda: [plain(n, dtype=F32)],
                exp_avg_sqs=lambda: [plain(n, dtype=F32, std=0)], master_params=lambda: [plain(n, dtype=F32)], lr=1e-4)
    def build_adam(library):
        closure, moved = call("multi_tensor_adam", **adam)(library)
        return closure, moved + 3 * n * 4  # moments and master weights are both read and written
    def build_scale_update(library):
        sites = 12
        histories = [plain(1024, 1, dtype=F32) for _ in range(sites)]
        scales = [plain(1, dtype=F32) for _ in range(sites)]
        return OpCall(library, "fused_amax_and_scale_update_after_reduction", amax_histories=histories, scales=scales,
                    algo=0, fp8_dtype=0, margin=0.0), sites * 1024 * 8
    return [
        Case("multi_tensor_adam 64M", build_adam, 0.90),
        Case("scale update, 12 sites x 1024", build_scale_update, None, tags=("latency",)),
    ]


def op_cases():
    return (norms() + quantisation() + activations() + softmax() + rope() + dropping() + copies() + tables() + others())
