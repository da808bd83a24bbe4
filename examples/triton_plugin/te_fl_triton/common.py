"""Helpers of the three op families."""

import os

import te_fl

from te_fl_triton import handlers

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's interpreter is not thread-safe
DTYPES = ("f32", "f16", "bf16")


def implementation(op_name, fn, supports, devices):
    fn = handlers.kept(fn)
    return te_fl.OpImpl(op_name, "default.triton", te_fl.BackendImplKind.DEFAULT, fn, supported_dtypes=DTYPES, supports=supports,
                        devices=devices, tensors="torch", supports_tensors="te_fl", in_place=True, deterministic=True, thread_safe=not INTERPRETED)


def compact(**tensors):
    """Returns True, or an error text that names a tensor which is not compact; the kernels do not support strides."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.contiguous:
            return f"{name} has strides {tensor.strides} at shape {tensor.shape}, and the kernels take compact tensors"
    return True
