"""Transformer Engine's environment variables. The recipes read some, and one maps to a te-fl variable; for the others te-fl warns that they have no
effect.
"""

import contextlib
import os
import sys
import warnings

from te_fl.errors import InvalidArgument

DETERMINISM = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"  # 0: TE_FL_DETERMINISTIC=1

HONOURED = (DETERMINISM, "NVTE_BACKWARD_OVERRIDE", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
            "NVTE_NVFP4_4OVER6", "NVTE_NVFP4_4OVER6_E4M3_USE_256", "NVTE_NVFP4_4OVER6_ERR_MODE", "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
            "NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "NVTE_NVFP4_ROW_SCALED_ACTIVATION")
_INSTEAD = {"NVTE_FLASH_ATTN": "TE_FL_PER_OP", "NVTE_FUSED_ATTN": "TE_FL_PER_OP", "NVTE_UNFUSED_ATTN": "TE_FL_PER_OP",
            "NVTE_DEBUG": "TE_FL_LOG_LEVEL", "NVTE_DEBUG_LEVEL": "TE_FL_LOG_LEVEL"}
_warned: set = set()


def read_determinism() -> None:
    """Sets TE_FL_DETERMINISTIC if NVTE_ALLOW_NONDETERMINISTIC_ALGO requests determinism and TE_FL_DETERMINISTIC is unset or empty.

    This reads os.environ, because the value of a setting does not tell whether it is set.
    """
    value = os.environ.get(DETERMINISM)
    if value is None or value == "1" or os.environ.get("TE_FL_DETERMINISTIC", "").strip():
        return
    if value != "0":
        raise InvalidArgument(f"{DETERMINISM} is {value!r}; it is 0 (only what gives the same bits in every run) or 1")
    os.environ["TE_FL_DETERMINISTIC"] = "1"
    native = sys.modules.get("te_fl._native")
    if native is not None:
        with contextlib.suppress(InvalidArgument):  # other invalid variables; the next op call reports them
            native.reload()


def read_variables() -> None:
    """Applies NVTE_ALLOW_NONDETERMINISTIC_ALGO, and warns once for each NVTE_ variable that is set but has no effect in te-fl.

    If te-fl runs inside NVIDIA's package (te_fl.inside), that package reads the variables, so there are no warnings.
    """
    read_determinism()
    inside = sys.modules.get("te_fl.inside")
    if inside is not None and inside.started():
        return
    ignored = sorted(n for n in os.environ if n.startswith("NVTE_") and n not in HONOURED and n not in _warned)
    if ignored:
        _warned.update(ignored)
        listed = ", ".join(f"{n} (see {_INSTEAD[n]})" if n in _INSTEAD else n for n in ignored)
        warnings.warn(f"te-fl does not honour {listed}; unset them, or choose with TE_FL_ variables (docs/operators.md)", stacklevel=3)
