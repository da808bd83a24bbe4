"""NVTE_PLUGIN=te_fl.transformer_engine_plugin: replaces Transformer Engine's extension by te-fl's module, through Transformer Engine's own plugin
mechanism.

Transformer Engine imports this module after its extension, which it keeps as transformer_engine_torch_nv, and calls load_plugins(). If that fails, it
warns and continues with its extension. With TE_FL_STRICT=1 the process ends instead, since the results would not come from te-fl.
"""

from __future__ import annotations

import sys

from te_fl import _native, inside
from te_fl.compat import finder
from te_fl.errors import FailedPrecondition
from te_fl.inside import package


def _load() -> None:
    if inside.started():
        raise FailedPrecondition(f"NVTE_PLUGIN: te-fl is inside this process already ({inside.VARIABLE}, te_fl.inside_transformer_engine); use one way")
    if finder.status()["active"]:
        raise FailedPrecondition("NVTE_PLUGIN: transformer_engine stands for te-fl in this process (te_fl.as_transformer_engine); use one way")
    sys.modules["transformer_engine_torch"] = package.extension()
    package.install_beside_extension()


def load_plugins() -> None:
    try:
        _load()
    except Exception as error:
        if _native.setting("TE_FL_STRICT"):
            print(f"te-fl cannot take the place of transformer_engine_torch, and TE_FL_STRICT forbids NVIDIA's extension instead: {error}", file=sys.stderr)
            raise SystemExit(1) from error
        raise
