"""RMSNorm, SwiGLU and RoPE, forward and backward, in Triton: DEFAULT implementations for CUDA tensors.

te-fl finds the installed package by its entry point `te_fl.plugin`; without an installation, set TE_FL_PLUGIN_MODULES=te_fl_triton. With
TRITON_INTERPRET=1 the kernels run on the host, slowly, for tests on machines without a GPU.
"""

__version__ = "1.0.0"


def register(registry):
    """Registers the ops that can run on this machine. Without Triton or a GPU it registers none, and te_fl.info() shows the reason."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise NotImplementedError(f"{error}; `pip install torch triton` brings what its kernels need") from error
    from te_fl_triton.common import INTERPRETED
    if not INTERPRETED and not torch.cuda.is_available():
        raise NotImplementedError("PyTorch finds no CUDA device; TRITON_INTERPRET=1 runs its kernels on the host, for tests")
    from te_fl_triton import rmsnorm, rope, swiglu
    devices = ("cpu",) if INTERPRETED else ("cuda",)
    registry.register_many(rmsnorm.implementations(devices) + swiglu.implementations(devices) + rope.implementations(devices))
