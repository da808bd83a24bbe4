"""Imports NVIDIA's pure Python package transformer_engine on te-fl, with the host standing in for CUDA. Tests import this module first.

tools/test.sh installs the package (requirements-inside.txt) outside of build/python-env's other packages, so that the other
tests run without it.
"""

import importlib.util
import os
import sys
import unittest

_BESIDE = os.path.join(sys.prefix, "inside")
if os.path.isdir(_BESIDE):
    sys.path.insert(0, _BESIDE)
for needed in ("torch", "transformer_engine", "pydantic", "onnxscript"):
    if importlib.util.find_spec(needed) is None:
        raise unittest.SkipTest(f"{needed} is not installed (tests/python/requirements.txt, requirements-inside.txt)")

import te_fl  # noqa: E402

te_fl.inside_transformer_engine(device="cpu")
