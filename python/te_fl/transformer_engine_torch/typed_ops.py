"""A vendor's functions with Transformer Engine's arguments as implementations of the typed ops, for te_fl.pytorch.

An adapter serves plain tensors only: no quantised ones, no scaling modes, no arguments that Transformer Engine's function does not have. It is
registered with the function, under the function's impl_id, kind, vendor and priority. A typed op writes its outputs in place: the function's results
are copied there, unless the function takes the output.

WITHOUT names the functions that are no implementation of the typed op of their name, with the reason.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Optional

from te_fl.errors import Unsupported
from te_fl.registration import DEVICE_TYPES, OpImpl
from te_fl.tex_form import NOT_BEGUN, TYPED_NAMES, TexImpl
from te_fl.torch_streams import private_name
from te_fl.transformer_engine_torch import typed_attention, typed_dense, typed_experts  # noqa: F401  (they register the adapters)
from te_fl.transformer_engine_torch.typed_function import ADAPTERS, LIMITS, VendorFunction

_QUANTISED = "its result is quantised, and the function has a quantizer of Transformer Engine's Python package for it"
_OF_NOBODY = "TransformerEngine-FL does not have the function, so that no vendor's package has it"
# docs/transformer-engine-functions.md has this table.
WITHOUT = {
    **dict.fromkeys("quantize dequantize bgrad_quantize multi_tensor_quantize split_quantize cast_to_fp8".split(), _QUANTISED),
    **dict.fromkeys("""situglu dsituglu scaled_swiglu scaled_dswiglu scaled_clamped_swiglu scaled_clamped_dswiglu scaled_srelu scaled_dsrelu scaled_situglu
        scaled_dsituglu""".split(), _OF_NOBODY),
    "dropout_fwd": "the op's mask follows from its seed, the function's from a generator",
    "get_fused_attn_backend": "it answers for Transformer Engine's choice among kernels; te_fl.pytorch does not ask for it",
    "splits_to_offsets": "the op refuses negative lengths, which the function does not check",
}


def _reason(impl: TexImpl) -> str:
    """Returns the reason for which the function is not to be tried now; empty if it may be."""
    runner = impl.calls()
    return "it failed in this call already, in its form with Transformer Engine's arguments" if runner.failed_in_call() else runner.refusal()


def _no_limits(function: VendorFunction) -> Callable[[], bool]:
    return lambda: True


# Ops that update their arguments, so that no other implementation can run a call that failed half-way.
_WRITERS = ("multi_tensor_scale", "multi_tensor_adam", "multi_tensor_sgd", "fused_amax_and_scale_update_after_reduction")


def adapted(impl: TexImpl) -> Optional[OpImpl]:
    """The implementation of the typed op by the function; None if there is no adapter for the op."""
    make = ADAPTERS.get(impl.op_name)
    if make is None:
        return None
    function = VendorFunction(impl)
    plain, limits = make(function), LIMITS.get(impl.op_name, _no_limits)(function)
    is_writer = impl.op_name in _WRITERS

    @functools.wraps(plain)
    def fn(**arguments: Any) -> None:
        try:
            plain(**arguments)
        except NotImplementedError:
            raise
        except Exception as error:
            if is_writer and not isinstance(error, NOT_BEGUN):
                raise
            # Outputs are written in full by the next implementation.
            raise Unsupported(f"it failed with {type(error).__name__}: {error}") from error

    @functools.wraps(limits)
    def supports(**arguments: Any) -> Any:
        return _reason(impl) or limits(**arguments)
    devices = impl.devices
    if devices is None:
        private = private_name()
        devices = [*(d for d in DEVICE_TYPES if d != "ext"), *([f"ext:{private}"] if private != "privateuseone" else [])]
    return OpImpl(TYPED_NAMES.get(impl.op_name, impl.op_name), impl.impl_id, impl.kind, fn, vendor=impl.vendor, priority=impl.priority,
                  supported_dtypes=impl.supported_dtypes, min_arch=impl.architecture or None, supports=supports, devices=devices, tensors="torch", supports_tensors="te_fl")
