"""Versions of libraries, and other small answers."""

from __future__ import annotations

import torch

__all__ = ["device_supports_multicast", "get_cublasLt_version", "get_cudnn_version", "get_num_cublas_streams", "get_stream_priority_range",
           "ubuf_built_with_mpi"]


def get_cublasLt_version() -> int:
    """As cublasLtGetVersion() counts; 0 where PyTorch has no CUDA. The package asks it which layouts it may use."""
    return 130100 if torch.version.cuda else 0


def get_cudnn_version() -> int:
    """As cudnnGetVersion() counts: 91900 is 9.19.0; 0 where PyTorch has no cuDNN."""
    return torch.backends.cudnn.version() or 0


def get_num_cublas_streams() -> int:
    """Streams over which the package divides grouped products, which te-fl divides itself."""
    return 1


def get_stream_priority_range(device_id: int = -1) -> tuple:
    """(lowest, highest)."""
    return (0, -1)


def ubuf_built_with_mpi() -> bool:
    return False


def device_supports_multicast(device_id: int = -1) -> bool:
    """Of the communication buffers, which te-fl does not have."""
    return False
