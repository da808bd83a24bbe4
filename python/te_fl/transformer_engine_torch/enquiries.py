"""Library versions and other queries."""

from __future__ import annotations

import ctypes
import functools

import torch

__all__ = ["device_supports_multicast", "get_cublasLt_version", "get_cudnn_version", "get_num_cublas_streams", "get_stream_priority_range",
           "nvte_built_with_cublasmp", "ubuf_built_with_mpi"]


@functools.lru_cache(maxsize=None)
def get_cublasLt_version() -> int:
    """cublasLtGetVersion() of PyTorch's cuBLASLt; 0 if there is none. Transformer Engine derives the supported formats from it."""
    for name in (f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}", "libcublasLt.so"):
        try:
            version = ctypes.CDLL(name).cublasLtGetVersion
        except (OSError, AttributeError):
            continue
        version.restype = ctypes.c_size_t
        return version()
    return 0


def get_cudnn_version() -> int:
    """The version number of PyTorch's cuDNN as cudnnGetVersion() gives it (91900 is 9.19.0); 0 without cuDNN."""
    return torch.backends.cudnn.version() or 0


def get_num_cublas_streams() -> int:
    """The number of streams over which Transformer Engine distributes grouped products; 1, since te-fl distributes them itself."""
    return 1


def get_stream_priority_range(device_id: int = -1) -> tuple:
    """(lowest, highest) stream priority of the current device, the only one that PyTorch can query; (0, 0) without priorities."""
    priorities = getattr(torch.cuda.Stream, "priority_range", None) if torch.cuda.is_available() else None
    return (0, 0) if priorities is None else tuple(priorities())


def ubuf_built_with_mpi() -> bool:
    return False


def nvte_built_with_cublasmp() -> bool:
    return False


def device_supports_multicast(device_id: int = -1) -> bool:
    """Always false: only communication buffers need multicast, and te-fl has none."""
    return False
