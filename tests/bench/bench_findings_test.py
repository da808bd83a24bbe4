#!/usr/bin/env python3
"""Tests that the results of bench/gpu record the libraries that the plugin uses. A stub NCCL is loaded into the process. usage:
bench_findings_test.py BENCH_LIBRARY PLUGIN NCCL"""
import ctypes
import json
import os
import sys

library, plugin, nccl = sys.argv[1:]
os.environ["TE_FL_PLUGIN_PATH"] = ""  # the test loads the plugin explicitly below
ctypes.CDLL(nccl)
bench = ctypes.CDLL(library)
bench.tb_findings.restype = bench.tb_error.restype = ctypes.c_char_p
if bench.tb_findings() is not None or b"cuda" not in bench.tb_error():
    sys.exit("tb_findings() answers before the plugin is loaded")
if bench.tb_init(plugin.encode()) != 0:
    sys.exit(bench.tb_error().decode())
text = bench.tb_findings()
if text is None:
    sys.exit(bench.tb_error().decode())
found = {f["subject"]: f["state"] for f in json.loads(text)}
print(found)
for subject in ("cuBLASLt", "cuDNN"):
    if not found.get(subject):
        sys.exit(f"nothing is said of {subject}")
if found.get("NCCL") != f"2.27.3, {nccl}":
    sys.exit(f"NCCL: {found.get('NCCL')}, expected 2.27.3, {nccl}")
