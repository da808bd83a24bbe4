"""Queries of the current FP8 scope, under Transformer Engine's names."""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from te_fl.common.recipe import Recipe
from te_fl.errors import FailedPrecondition, Unsupported
from te_fl.pytorch.fp8 import availability, quantization
from te_fl.pytorch.runtime.device import default_device

__all__ = ["FP8GlobalStateManager"]


class _Missing(Unsupported, AttributeError):
    """Raised for parts of Transformer Engine's class that te-fl does not have."""


# Calls by which a framework that captures CUDA graphs itself updates delayed scaling's scales around replays.
_OF_CAPTURES = frozenset(("add_fp8_tensors_to_global_buffer", "is_first_fp8_module", "reduce_and_update_fp8_tensors"))


class _UnservedNames(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _OF_CAPTURES:
            raise _Missing(f"{cls.__name__}.{name} is not supported by te-fl: it is for delayed scaling in CUDA graphs that a framework captures itself; give another recipe "
                           "(Megatron-core: fp8_recipe='tensorwise' or 'blockwise'), capture with te_fl.pytorch.make_graphed_callables(), whose graphs update "
                           "scales, or leave graphs out (cuda_graph_impl='none')")
        raise _Missing(f"{cls.__name__}.{name} is not supported by te-fl, whose layers keep their own FP8 state; it has is_fp8_enabled(), "
                       "is_fp8_calibration(), get_fp8_recipe(), with_fp8_parameters(), with_high_precision_init_val() and the is_.._available()")


class FP8GlobalStateManager(metaclass=_UnservedNames):
    """The te.autocast settings of this thread."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return quantization.enabled()

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return quantization.calibrating()

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe of the innermost autocast, else of quantized_model_init, else get_default_recipe()."""
        init = quantization.model_init()
        return quantization.active_recipe() or (init.recipe if init is not None else availability.get_default_recipe())

    @classmethod
    def get_fp8_group(cls) -> Optional[object]:
        """The amax_reduction_group given to autocast; None if none was given."""
        return quantization.group()

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """True if modules constructed now store their weights as FP8 codes only."""
        return quantization.model_init() is not None

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """True if such weights also keep the high-precision values that the codes were made from."""
        init = quantization.model_init()
        return init is not None and init.preserve_high_precision_init_val

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """True during the capture of a CUDA graph."""
        return quantization.graph_capturing()

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """For a framework that captures CUDA graphs itself: tells later replays whether to reuse the quantised weights (skip=True) or quantise them
        again.

        Call it before the first warm-up. Work captured between pytorch.graph's set_capture_start() and set_capture_end() reads this flag and ignores
        is_first_microbatch.
        """
        captures = quantization.captures
        if captures.flag is None:
            captures.flag = torch.zeros(1, dtype=torch.float32, device=default_device())
        captures.flag.fill_(float(skip))

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> Optional[torch.Tensor]:
        """The tensor that set_skip_fp8_weight_update_tensor() writes, F32 [1]; None before its first call."""
        return quantization.captures.flag

    @classmethod
    def reset(cls) -> None:
        """Resets the process-wide settings, for example between tests: the flag of set_skip_fp8_weight_update_tensor() and the start of a capture.
        The FP8 state of layers is kept. FailedPrecondition inside of te.autocast or quantized_model_init.
        """
        if quantization._state.scopes or quantization.model_init() is not None:
            raise FailedPrecondition("FP8GlobalStateManager.reset() was called inside of te.autocast or quantized_model_init, which would "
                                     "end them early; call it after their scope")
        quantization.captures.started, quantization.captures.flag = False, None

    @classmethod
    def is_fp8_available(cls) -> Tuple[bool, str]:
        return availability.check_fp8_support()

    @classmethod
    def is_mxfp8_available(cls) -> Tuple[bool, str]:
        return availability.check_mxfp8_support()

    @classmethod
    def is_fp8_block_scaling_available(cls) -> Tuple[bool, str]:
        return availability.check_fp8_block_scaling_support()

    @classmethod
    def is_nvfp4_available(cls) -> Tuple[bool, str]:
        return availability.check_nvfp4_support()
