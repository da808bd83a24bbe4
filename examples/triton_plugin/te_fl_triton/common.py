"""Shared by the three families of ops."""

import os

import te_fl

from te_fl_triton import handlers

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter serves one thread at a time
DTYPES = ("f32", "f16", "bf16")


def implementation(op_name, fn, supports, devices):
    fn = handlers.kept(fn)
    return te_fl.OpImpl(op_name, "default.triton", te_fl.BackendImplKind.DEFAULT, fn, supported_dtypes=DTYPES, supports=supports,
                        devices=devices, tensors="torch", in_place=True, deterministic=True, thread_safe=not INTERPRETED)


def compact(**tensors):
    """True, or which tensor is not compact: the kernels count elements, they know no strides."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.contiguous:
            return f"{name} has strides {tensor.strides} at shape {tensor.shape}, and the kernels take compact tensors"
    return True
