"""Finds the fastest cuBLASLt algorithm of one GEMM by timing every candidate of the library's heuristic under load."""

import ctypes
import random
import statistics

import torch

R_32F, R_16BF, R_8F_E4M3, R_8F_E5M2 = 0, 14, 28, 29
COMPUTE_32F = 68
TYPES = {torch.float32: R_32F, torch.bfloat16: R_16BF, torch.float8_e4m3fn: R_8F_E4M3, torch.float8_e5m2: R_8F_E5M2}
# values of cublasLtMatmulDescAttributes_t
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, BIAS_TYPE, FAST_ACCUM = 3, 4, 7, 8, 26, 25
A_SCALE, B_SCALE = 17, 18
A_SCALE_MODE, B_SCALE_MODE = 31, 32
VEC128, BLOCK128 = 4, 5  # values of cublasLtMatmulMatrixScale_t: a scale per 128 elements of a row, a scale per 128x128 block
EPILOGUE_BIAS = 4
WORKSPACE = 32 << 20


class Result(ctypes.Structure):
    _fields_ = [("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


class Opaque(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 64)]


def open_library():
    for line in open("/proc/self/maps"):  # the libcublasLt that PyTorch has loaded
        if "libcublasLt.so" in line:
            return ctypes.CDLL(line.split()[-1])
    return ctypes.CDLL("libcublasLt.so.13")


class Product:
    """A row-major GEMM D[m, n] = A[m, k] B[n, k]^T (+ bias[n]). cuBLASLt is column-major and computes D^T = B A^T."""

    def __init__(self, a, b, d, bias=None, trans_a=False, trans_b=True, fast_accum=True, scales=None,
                 scale_modes=None):
        self.lib = open_library()
        self.tensors = (a, b, d, bias, scales)
        self.handle = ctypes.c_void_p()
        self.ok(self.lib.cublasLtCreate(ctypes.byref(self.handle)))
        self.desc, self.left, self.right, self.out, self.preference = (Opaque() for _ in range(5))
        self.ok(self.lib.cublasLtMatmulDescInit_internal(ctypes.byref(self.desc), 256, COMPUTE_32F, R_32F))
        is_fp8 = a.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        m, n = d.shape
        self.set(TRANSA, ctypes.c_int32(1 if trans_b else 0))
        self.set(TRANSB, ctypes.c_int32(1 if trans_a else 0))
        if is_fp8:
            self.set(FAST_ACCUM, ctypes.c_int8(int(fast_accum)))
            self.set(A_SCALE, ctypes.c_void_p(scales[1].data_ptr()))
            self.set(B_SCALE, ctypes.c_void_p(scales[0].data_ptr()))
        if scale_modes is not None:
            self.set(A_SCALE_MODE, ctypes.c_int32(scale_modes[1]))
            self.set(B_SCALE_MODE, ctypes.c_int32(scale_modes[0]))
        if bias is not None:
            self.set(EPILOGUE, ctypes.c_int32(EPILOGUE_BIAS))
            self.set(BIAS_TYPE, ctypes.c_int32(TYPES[bias.dtype]))
            self.set(BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        for layout, t in ((self.left, b), (self.right, a), (self.out, d)):
            rows, cols = t.shape
            self.ok(self.lib.cublasLtMatrixLayoutInit_internal(
                ctypes.byref(layout), 64, TYPES[t.dtype], ctypes.c_uint64(cols), ctypes.c_uint64(rows),
                ctypes.c_int64(cols)))
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self.ok(self.lib.cublasLtMatmulPreferenceInit_internal(ctypes.byref(self.preference), 64))
        size = ctypes.c_uint64(WORKSPACE)
        self.ok(self.lib.cublasLtMatmulPreferenceSetAttribute(ctypes.byref(self.preference), 1, ctypes.byref(size), 8))

    def ok(self, status):
        if status != 0:
            raise RuntimeError(f"cuBLASLt status {status}")

    def set(self, attribute, value):
        self.ok(self.lib.cublasLtMatmulDescSetAttribute(ctypes.byref(self.desc), attribute, ctypes.byref(value),
                                                        ctypes.sizeof(value)))

    def version(self):
        self.lib.cublasLtGetVersion.restype = ctypes.c_size_t
        return self.lib.cublasLtGetVersion()

    def candidates(self, most=64):
        found, results = ctypes.c_int(), (Result * most)()
        self.ok(self.lib.cublasLtMatmulAlgoGetHeuristic(
            self.handle, ctypes.byref(self.desc), ctypes.byref(self.left), ctypes.byref(self.right),
            ctypes.byref(self.out), ctypes.byref(self.out), ctypes.byref(self.preference), most, results,
            ctypes.byref(found)))
        return [results[i] for i in range(found.value) if results[i].state == 0]

    def run(self, result):
        a, b, d, _, _ = self.tensors
        alpha, beta = ctypes.c_float(1), ctypes.c_float(0)
        out = ctypes.c_void_p(d.data_ptr())
        self.ok(self.lib.cublasLtMatmul(
            self.handle, ctypes.byref(self.desc), ctypes.byref(alpha), ctypes.c_void_p(b.data_ptr()),
            ctypes.byref(self.left), ctypes.c_void_p(a.data_ptr()), ctypes.byref(self.right), ctypes.byref(beta), out,
            ctypes.byref(self.out), out, ctypes.byref(self.out), ctypes.byref(result.algo),
            ctypes.c_void_p(self.workspace.data_ptr()), ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)))

    def best(self):
        """Returns the heuristic's fastest candidate on a chip under load, and how many candidates ran. Measures as te-fl does
        (backends/cuda/gemm/gemm_selection.cpp): a short run of each candidate, then rounds of sequences in random order; the smallest median wins."""
        us, order = {}, random.Random(1)
        for i, result in enumerate(field := self.candidates()):
            try:
                us[i] = self.time(result, 2)
            except RuntimeError:
                pass
        timed = len(us)
        if timed == 0:
            raise RuntimeError("cuBLASLt runs none of its candidates")
        for most, rounds, sequence_us in ((8, 3, 30000), (4, 5, 80000)):
            kept = sorted(us, key=us.get)[:most]
            times = {i: [] for i in kept}
            for _ in range(rounds):
                order.shuffle(kept)
                for i in kept:
                    times[i].append(self.time(field[i], max(3, int(sequence_us / us[i]))))
            us = {i: statistics.median(t) for i, t in times.items()}
        return field[min(us, key=us.get)], timed

    def time(self, result, calls):
        """Returns microseconds per call of `calls` consecutive calls, after an untimed call."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.run(result)
        begin.record()
        for _ in range(calls):
            self.run(result)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / calls
