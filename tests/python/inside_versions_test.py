"""Tests te-fl with versions of NVIDIA's package older and newer than the one it is written for: each version's calls are interpreted by that
version's meaning, the oldest version computes the same numbers, and unknown calls of a newer one are refused by name. tools/inside_versions.py writes
the record and the table of the page."""

import inspect
import json
import os
import pathlib
import subprocess
import sys
import types
import unittest
from unittest import mock

import inside_package  # noqa: F401  (first: it brings the package in)
from forkserver import PYTHON
import torch
import transformer_engine
import transformer_engine.pytorch as te
import transformer_engine_torch as tex

from te_fl.errors import InvalidArgument, Unsupported
from te_fl.inside import calls, package
from te_fl.transformer_engine_torch import absent, older

HERE = pathlib.Path(__file__).resolve().parent
RECORD = json.loads((HERE / "transformer_engine_torch_versions.json").read_text())
# Error texts of cases that the package's own recipes refuse.
REFUSED = {"te.ops.Sequential block": "Fusible operations do not support FP8 block scaling"}
# Cases with version-specific numbers -> how many leading numbers are nevertheless equal. Until 2.15 FusedAdam writes codes with the scale that the
# quantizer stores, as under delayed scaling.
OWN_NUMBERS = {"quantized_model_init current": 4}


def list_uses(version):
    """Returns the calls and names of a version; the record lists only differences from the next newer version."""
    forms = {}
    for newer, entry in RECORD.items():
        forms = {**{n: f for n, f in forms.items() if n not in entry["uncalled"]}, **entry["calls"]}
        if newer == version:
            sets = {name: {(count, frozenset(keywords)) for count, keywords in found} for name, found in forms.items()}
            return calls.Uses(sets, set(forms) | set(entry["names"]))
    raise KeyError(version)


def members_for(version):
    return {**vars(tex), **older.list_forms(package.parse_version(version))}


def trial(version, *only):
    """Returns the results of inside_trial.py; None if tools/test.sh has not installed the version."""
    folder = os.path.join(os.environ.get("INSIDE_VERSIONS", sys.prefix), version if "INSIDE_VERSIONS" in os.environ else f"inside-{version}")
    if version == transformer_engine.__version__:
        folder = str(pathlib.Path(transformer_engine.__file__).parents[1])
    if not os.path.isdir(folder):
        return None
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NVTE_", "TE_FL_"))}
    result = subprocess.run([*PYTHON, str(HERE / "inside_trial.py"), folder, *only], env=environment, capture_output=True, text=True, timeout=300)
    if result.returncode:
        raise AssertionError(result.stderr)
    return json.loads(result.stdout)


class Record(unittest.TestCase):
    def test_every_call_of_every_version_is_taken(self):
        for version in RECORD:
            with self.subTest(version):
                self.assertEqual(calls.unknown(list_uses(version), members_for(version)), {})

    def test_arguments_by_place_are_those_of_the_version(self):
        """For a version with other parameters than 2.20, te-fl's function has that version's parameter names in the same order."""
        for version, entry in RECORD.items():
            members = members_for(version)
            for name, wanted in entry["parameters"].items():
                if name in absent.REASONS:
                    continue
                found = inspect.signature(members[name]).parameters
                behind = list(found.values())[len(wanted):]  # further parameters were added by a newer version
                with self.subTest(f"{version} {name}"):
                    self.assertEqual([_plain(n) for n in list(found)[:len(wanted)]], [_plain(n) for n in wanted])
                    self.assertFalse([p.name for p in behind if p.default is p.empty])

    def test_installed_package_is_the_record(self):
        folder = pathlib.Path(transformer_engine.__file__).parent
        self.assertEqual(calls.of_package(folder), list_uses(transformer_engine.__version__))


def _plain(name):
    """Maps a parameter name of te-fl to the header's name where they differ."""
    return {"fwd_input": "input", "grad_probs": "grad_scores"}.get(name, name)


class Numbers(unittest.TestCase):
    def compare(self, version, *only):
        found = trial(version, *only)
        if found is None:
            self.skipTest(f"transformer_engine {version} is not installed (tests/python/requirements-inside-older.txt)")
        self.assertEqual(found["version"], version)
        base = trial(transformer_engine.__version__, *only)["cases"]
        self.assertGreaterEqual(len(base), 2 if only else 40)
        for name, numbers in found["cases"].items():
            with self.subTest(name):
                self.assertNotIsInstance(base[name], str)
                if name in REFUSED:
                    self.assertIn(REFUSED[name], numbers)
                else:
                    own = OWN_NUMBERS.get(name)
                    self.assertEqual(numbers[:own], base[name][:own])

    def test_oldest(self):
        self.compare("2.14.1")

    def test_middle(self):
        self.compare("2.17.1", "router", "fp8_output")


class Enquiries(unittest.TestCase):
    """Tests call forms whose values inside_trial.py does not print."""

    def test_shares_of_a_result(self):
        """Until 2.19 each step of context parallelism adds its part of the output, weighted with the latest log-sum-exp."""
        torch.manual_seed(1)
        tokens, heads, ends = 8, 2, torch.tensor([0, 8], dtype=torch.int32)
        steps = [(torch.randn(tokens, heads, 4), torch.randn(heads, tokens)) for _ in range(3)]
        total = torch.logsumexp(torch.stack([lse for _, lse in steps]), 0)
        out = torch.zeros(tokens, heads, 4)
        for step, lse in steps:
            older.thd_out_correction(out, step, total, lse, ends, False, True)
        want = sum(step * (lse - total).exp().t().unsqueeze(-1) for step, lse in steps)
        torch.testing.assert_close(out, want)

    def test_window_from_a_corner_that_is_not_said(self):
        shared = (True, tex.DType.kBFloat16, tex.DType.kBFloat16, tex.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, tex.NVTE_Bias_Type.NVTE_NO_BIAS)
        sizes = (tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, 0.0, 4, 4, 16, 32, 16, 16)
        flags = (False, False, False)
        none = tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend
        ask = older.get_fused_attn_backend
        masks = tex.NVTE_Mask_Type
        self.assertNotEqual(ask(*shared, masks.NVTE_NO_MASK, *sizes, -1, -1, *flags), none)
        self.assertEqual(ask(*shared, masks.NVTE_NO_MASK, *sizes, 4, 4, *flags), none)
        self.assertNotEqual(ask(*shared, masks.NVTE_CAUSAL_MASK, *sizes, 4, 0, *flags), none)
        self.assertEqual(ask(*shared, masks.NVTE_CAUSAL_MASK, *sizes, -1, -1, True, False, False), none)
        self.assertEqual(ask(*shared[:2], tex.DType.kFloat16, *shared[3:], masks.NVTE_NO_MASK, *sizes, -1, -1, *flags), none)

    def test_amax_that_is_there(self):
        """Before 2.16 a quantizer for current scaling stores scale and amax, and has an option to use the stored amax."""
        torch.manual_seed(1)
        x = torch.randn(16, 32)
        for internal in (False, True):
            quantizer = te.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device="cpu")
            quantizer.internal = internal
            quantizer.scale, quantizer.amax, quantizer.use_existing_amax = torch.ones(1), torch.zeros(1), False
            tex.quantize(x, quantizer)
            self.assertEqual((quantizer.amax.item(), quantizer.scale.item()), (x.abs().max().item(), (448.0 / x.abs().max()).item()))
            quantizer.amax.fill_(1.0)
            quantizer.use_existing_amax = True
            out = tex.quantize(x, quantizer)
            self.assertEqual((quantizer.scale.item(), quantizer.amax.item()), (448.0, 1.0))
            want = (x * 448.0).clamp(-448, 448).to(torch.float8_e4m3fn)
            self.assertTrue(torch.equal(out._data, want.view(torch.uint8)))
            torch.testing.assert_close(out._scale_inv, torch.tensor([1 / 448.0]))

    def test_disagreements(self):
        grad = torch.zeros(4, 8)
        former = older.list_forms((2, 16))["fused_score_for_moe_aux_loss_bwd"]
        with self.assertRaisesRegex(InvalidArgument, r"num_tokens and num_experts say \(8, 4\)"):
            former(8, 4, grad, grad, grad, 2, "softmax")


class Newer(unittest.TestCase):
    def test_unknown(self):
        """Unknown calls of a newer version are listed at import and refused when called; known calls still work."""
        uses = calls.Uses({"quantize": {(7, frozenset())}, "dequantize": {(2, frozenset())}}, {"quantize", "dequantize", "invented"})
        module = types.ModuleType("transformer_engine_torch")
        vars(module).update(vars(tex))
        with mock.patch.object(calls, "of_package", lambda folder: uses), mock.patch("sys.stderr") as told:
            package._refuse_unknown(module, "2.21.0")
        text = "".join(call.args[0] for call in told.write.call_args_list)
        self.assertIn("refused by name: invented, quantize", text)
        for name in ("quantize", "invented"):
            with self.assertRaisesRegex(Unsupported, f"{name} is not supported.*2.21.0 is newer than 2.20"):
                getattr(module, name)(1)
        self.assertIs(module.dequantize, tex.dequantize)

    def test_attention_that_is_recomputed(self):
        """2.19 passes fused attention its packed input in addition to the parts of it; te-fl takes it as values only, without a gradient."""
        class Loader:
            @staticmethod
            def exec_module(module):
                module.FusedAttention = type("FusedAttention", (), {"forward": lambda self, q, packed_qkv=None, packed_kv=None: (packed_qkv, packed_kv)})

        packed = torch.ones(3, requires_grad=True)
        for version, detached in (("2.19.0", True), ("2.20.2", False), ("2.18.0", False)):
            module = types.ModuleType("backends")
            with mock.patch.object(package.importlib.metadata, "version", lambda name: version):
                package._execute_attention_backends(Loader, module)
            got, other = module.FusedAttention().forward(packed, packed_qkv=packed * 2)
            self.assertEqual((got.requires_grad, got.tolist(), other), (not detached, [2.0] * 3, None), version)

    def test_versions(self):
        for found, too_old in (("2.13.9", True), ("2.9.0", True), ("2.14.0", False), ("2.20.2+cu13", False), ("3.0.0.dev0", False)):
            with self.subTest(found):
                if too_old:
                    self.assertRaisesRegex(Unsupported, "older than 2.14", package._check_version, found)
                else:
                    package._check_version(found)
        self.assertEqual(older.list_forms(package.parse_version("2.20.0")), {})


if __name__ == "__main__":
    unittest.main()
