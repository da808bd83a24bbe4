#!/usr/bin/env python3
"""Measures the time of cuBLASLt's epilogues on the quickstart layer's GEMMs and the error of its dGELU. These are the reason why te-fl runs
GELU and its gradient in kernels of its own.

usage: gemm_epilogues.py

Per product: the best candidate's kernels for each epilogue, microseconds per call in alternating graphs of 20 calls, and for dGELU the
relative error in 512 rows against double precision. Needs PyTorch and a GPU; te-fl is not used.
"""

import ctypes
import statistics
import sys

try:
    import torch
except ModuleNotFoundError as missing:
    sys.exit(f"gemm_epilogues.py: {missing}; install PyTorch with CUDA (pip install torch), or run it with a Python that has it")

import measure
from cublaslt_candidates import BIAS_POINTER, BIAS_TYPE, EPILOGUE, R_16BF, Product

BF16 = torch.bfloat16
TOKENS, HIDDEN, FFN = 8192, 4096, 16384
EPILOGUES = {"default": 1, "bias": 4, "gelu_aux_bias": 164, "dgelu": 192, "dgelu_bgrad": 208, "bgradb": 512}
AUX_POINTER, AUX_LD, AUX_TYPE = 11, 12, 22  # values of cublasLtMatmulDescAttributes_t
PRODUCTS = {"bf16 fc2 dgrad": (TOKENS, FFN, HIDDEN, False, False, False, ["default", "dgelu", "dgelu_bgrad"]),
            "bf16 fc1 wgrad": (FFN, HIDDEN, TOKENS, True, False, False, ["default", "bgradb"]),
            "bf16 qkv wgrad": (12288, HIDDEN, TOKENS, True, False, False, ["default", "bgradb"]),
            "bf16 fc1 forward": (TOKENS, FFN, HIDDEN, False, True, False, ["bias", "gelu_aux_bias"]),
            "fp8 fc2 dgrad": (TOKENS, FFN, HIDDEN, False, True, True, ["default", "dgelu", "dgelu_bgrad"])}


def normal(*shape, std=1.0, dtype=BF16):
    return torch.empty(shape, device="cuda", dtype=BF16).normal_(0, std).to(dtype)


class Case:
    """One product with one epilogue. Keeps the memory alive that the descriptor points to."""

    def __init__(self, m, n, k, trans_a, trans_b, is_fp8, epilogue):
        a_dtype, b_dtype = (torch.float8_e5m2, torch.float8_e4m3fn) if is_fp8 else (BF16, BF16)
        self.a = normal(*((k, m) if trans_a else (m, k)), dtype=a_dtype)
        self.b = normal(*((n, k) if trans_b else (k, n)), dtype=b_dtype, std=1.0 if is_fp8 else 0.02)
        self.trans_b, self.d = trans_b, torch.empty(m, n, device="cuda", dtype=BF16)
        self.one = torch.ones(1, device="cuda")
        self.product = Product(self.a, self.b, self.d, None, trans_a, trans_b, False, (self.one, self.one))
        self.product.set(EPILOGUE, ctypes.c_int32(EPILOGUES[epilogue]))
        if "bias" in epilogue or "bgrad" in epilogue:
            self.bias = torch.zeros(max(m, n), device="cuda", dtype=BF16)
            self.product.set(BIAS_TYPE, ctypes.c_int32(R_16BF))
            self.product.set(BIAS_POINTER, ctypes.c_void_p(self.bias.data_ptr()))
        if "gelu" in epilogue:
            self.aux = normal(m, n)
            self.product.set(AUX_POINTER, ctypes.c_void_p(self.aux.data_ptr()))
            self.product.set(AUX_LD, ctypes.c_int64(n))
            if is_fp8:
                self.product.set(AUX_TYPE, ctypes.c_int32(R_16BF))
        self.algorithm, self.tried = self.product.best()

    def run(self):
        self.product.run(self.algorithm)

    def kernels(self):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.run()
            torch.cuda.synchronize()
        return [f"{e.name[:60]} {e.time_range.end - e.time_range.start:.0f} us" for e in profile.events()
                if e.device_type == torch.autograd.DeviceType.CUDA and "Memset" not in e.name]

    def dgelu_error(self, rows=512):
        """Returns ||got - exact|| / ||exact|| of the gradient through tanh GELU."""
        self.run()
        x = self.aux[:rows].double()
        c = (2 / torch.pi) ** 0.5
        t = torch.tanh(c * (x + 0.044715 * x**3))
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)
        b = self.b.double()
        exact = self.a[:rows].double() @ (b.t() if self.trans_b else b) * slope
        return ((self.d[:rows].double() - exact).norm() / exact.norm()).item()


def main():
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        sys.exit("gemm_epilogues.py: PyTorch finds no CUDA device; run it where there is one")
    torch.zeros(1, device="cuda")
    for title, (m, n, k, trans_a, trans_b, is_fp8, epilogues) in PRODUCTS.items():
        cases = {}
        for epilogue in epilogues:
            try:
                case = cases[epilogue] = Case(m, n, k, trans_a, trans_b, is_fp8, epilogue)
                print(f"{title:18} {epilogue:14} of {case.tried} candidates: {', '.join(case.kernels())}", flush=True)
            except RuntimeError as error:
                print(f"{title:18} {epilogue:14} refused: {error}", flush=True)
        times = measure.alternate({e: measure.Graph([c.run]) for e, c in cases.items()}, 5)
        print(f"{title:18} us: " + ", ".join(f"{e} {statistics.median(t):.0f}" for e, t in times.items()), flush=True)
        for epilogue, case in cases.items():
            if epilogue.startswith("dgelu"):
                print(f"{title:18} {epilogue}: {case.dgelu_error():.2e} from double precision", flush=True)
        del cases, times
        torch.cuda.empty_cache()
    print(measure.machine())


if __name__ == "__main__":
    main()
