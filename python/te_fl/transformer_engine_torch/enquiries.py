"""Versions of libraries, and other small answers."""

from __future__ import annotations

import ctypes
import functools

import torch

__all__ = ["device_supports_multicast", "get_cublasLt_version", "get_cudnn_version", "get_num_cublas_streams", "get_stream_priority_range",
           "nvte_built_with_cublasmp", "ubuf_built_with_mpi"]


@functools.lru_cache(maxsize=None)
def get_cublasLt_version() -> int:
    """As cublasLtGetVersion() counts, of the library that PyTorch brings; 0 where it has none. The package asks it which formats it may use."""
    for name in (f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}", "libcublasLt.so"):
        try:
            version = ctypes.CDLL(name).cublasLtGetVersion
        except (OSError, AttributeError):
            continue
        version.restype = ctypes.c_size_t
        return version()
    return 0


def get_cudnn_version() -> int:
    """As cudnnGetVersion() counts: 91900 is 9.19.0; 0 where PyTorch has no cuDNN."""
    return torch.backends.cudnn.version() or 0


def get_num_cublas_streams() -> int:
    """Streams over which the package divides grouped products, which te-fl divides itself."""
    return 1


def get_stream_priority_range(device_id: int = -1) -> tuple:
    """(lowest, highest) of the current device, since PyTorch tells of no other; (0, 0) where streams have no priorities."""
    priorities = getattr(torch.cuda.Stream, "priority_range", None) if torch.cuda.is_available() else None
    return (0, 0) if priorities is None else tuple(priorities())


def ubuf_built_with_mpi() -> bool:
    return False


def nvte_built_with_cublasmp() -> bool:
    return False


def device_supports_multicast(device_id: int = -1) -> bool:
    """Always false: it is asked for communication buffers, which te-fl does not have."""
    return False
