"""Brings NVIDIA's pure Python package transformer_engine in, on te-fl, with the host answering for CUDA. Tests import this first.

tools/test.sh installs the package beside build/python-env's other packages (requirements-inside.txt), and not among them, so that the other
tests run as where it is not installed.
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
