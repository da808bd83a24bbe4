"""The context that Transformer Engine offloads activations in, which te-fl has switched off alone."""

from __future__ import annotations

import contextlib
from typing import Any, Optional

from te_fl.pytorch.runtime.refuse import refuse


def get_cpu_offload_context(enabled: bool = False, num_layers: Optional[int] = 1, model_layers: int = 1, offload_activations: bool = True,
                            offload_weights: bool = False, double_buffering: bool = False, manual_synchronization: bool = False,
                            retain_pinned_cpu_buffers: bool = False, offload_stream: Optional[Any] = None):
    """(context, sync_function), and None for the controller with manual_synchronization: they do nothing, as Transformer Engine's with
    enabled=False, for which the other arguments say nothing. enabled=True is te_fl.errors.Unsupported."""
    if enabled:
        raise refuse("get_cpu_offload_context", "enabled", enabled, "te-fl offloads no activations; recompute them with checkpoint(), or keep them "
                     "on the device")
    nothing = contextlib.nullcontext(), lambda tensor: tensor
    return (*nothing, None) if manual_synchronization else nothing
