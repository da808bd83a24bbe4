"""Measures the host's time of a te-fl call against a direct call of the library and against a bare kernel launch."""

import ctypes
import statistics

import torch

from cublaslt_candidates import WORKSPACE, Product
from te_fl_bench import OpCall, plain

COUNT, ROUNDS = 200, 60  # fewer calls than the device's queue can hold

# An empty kernel with as many parameters as an elementwise kernel.
PTX = b""".version 8.0
.target sm_80
.address_size 64
.visible .entry nothing(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 n) { ret; }
"""


def bare_launch(library, stream):
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    for code in (driver.cuModuleLoadData(ctypes.byref(module), PTX),
                 driver.cuModuleGetFunction(ctypes.byref(function), module, b"nothing")):
        if code != 0:
            raise RuntimeError(f"the driver cannot load a kernel: error {code}")
    values = [ctypes.c_uint64(0) for _ in range(4)]
    parameters = (ctypes.c_void_p * 4)(*[ctypes.addressof(v) for v in values])
    address = ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p)
    return lambda: library.lib.tb_time_launch(address, function, parameters, stream, COUNT), (values, parameters)


def bare_matmul(library, product, result, stream):
    a, b, d, _, _ = product.tensors
    alpha, beta = ctypes.c_float(1), ctypes.c_float(0)
    pointers = [product.handle.value, ctypes.addressof(product.desc), ctypes.addressof(alpha), b.data_ptr(),
                ctypes.addressof(product.left), a.data_ptr(), ctypes.addressof(product.right), ctypes.addressof(beta),
                d.data_ptr(), ctypes.addressof(product.out), d.data_ptr(), ctypes.addressof(product.out),
                ctypes.addressof(result.algo), product.workspace.data_ptr()]
    arguments = (ctypes.c_void_p * len(pointers))(*pointers)
    address = ctypes.cast(product.lib.cublasLtMatmul, ctypes.c_void_p)
    return (lambda: library.lib.tb_time_matmul(address, arguments, ctypes.c_size_t(WORKSPACE), stream, COUNT),
            (alpha, beta, arguments, result, product))


def run(library, show):
    for name in ("tb_time_calls", "tb_time_launch", "tb_time_matmul"):
        getattr(library.lib, name).restype = ctypes.c_double
    stream = ctypes.c_void_p(torch.cuda.Stream().cuda_stream)
    a, b, d = (plain(256, 256) for _ in range(3))
    product = Product(a.torch, b.torch, d.torch)
    def te_fl(op, **arguments):
        call = OpCall(library, op, **arguments)
        return lambda: library.lib.tb_time_calls(call.op, ctypes.byref(call.memory), stream, COUNT), call
    timed = {"bare launch": bare_launch(library, stream), "add": te_fl("add", a=a, b=b, output=d),
             "bare cublasLtMatmul": bare_matmul(library, product, product.candidates()[0], stream),
             "generic_gemm": te_fl("generic_gemm", a=a, b=b, d=d, trans_b=True)}
    spent = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, (closure, _) in timed.items():
            torch.cuda.synchronize()
            ns = closure()
            if ns < 0:
                raise RuntimeError(f"{name}: {library.lib.tb_error().decode()}")
            spent[name].append(ns)

    # Subtracts neighbouring samples, because the host's clock speed drifts by more than the difference that is measured.
    def over(name, bare):
        return statistics.median(a - b for a, b in zip(spent[name], spent[bare]))
    for label, name, bare, target in (("add 256x256", "add", "bare launch", 400),
                                      ("generic_gemm 256x256x256", "generic_gemm", "bare cublasLtMatmul", 800)):
        show("host", bare, ns=statistics.median(spent[bare]))
        show("host", label, ns=statistics.median(spent[name]), over_bare_ns=over(name, bare), target=target)
