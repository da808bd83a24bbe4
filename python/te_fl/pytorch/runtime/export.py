"""The scope for exporting te-fl's modules with torch.onnx.export, with Transformer Engine's names."""

from __future__ import annotations

import contextlib
from typing import Callable, Dict, Iterator

__all__ = ["is_in_onnx_export_mode", "onnx_export", "te_translation_table"]

# Empty: for torch.onnx.export's custom_translation_table; modules are exported as PyTorch's own ops.
te_translation_table: Dict[Callable, Callable] = {}


class _State:
    exporting = False


state = _State()


@contextlib.contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """With enabled=True, torch.onnx.export(.., dynamo=True) traces te-fl's modules as PyTorch ops, which have ONNX translations:

        with te.onnx_export(enabled=True):
            torch.onnx.export(model.eval(), inputs, "model.onnx", dynamo=True)
    """
    before, state.exporting = state.exporting, bool(enabled)
    try:
        yield
    finally:
        state.exporting = before


def is_in_onnx_export_mode() -> bool:
    return state.exporting
