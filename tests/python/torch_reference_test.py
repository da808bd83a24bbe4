"""Runs a fixed part of the conformance table on reference.torch with the host's tensors. The part has cases of each op, drawn by a hash of their names.
Cases that it refuses are listed in conformance/expected_unsupported.txt. Where an op's operations can be repeated, their results are the ones that count."""

import dataclasses
import inspect
import json
import os
import pathlib
import tempfile
import unittest

import torch
import torch.utils.flop_counter

from te_fl import _check_worker, reference_torch
from te_fl.reference_torch import gemm, repeat
from te_fl.reference_torch.values import bits
from te_fl.registration import OpRegistry

CONFORMANCE = pathlib.Path(__file__).resolve().parents[2] / "conformance"


# Ops whose functions read values of the host's memory (indices, lengths, places in a table) or a seed, so that no call is repeated.
ONCE = {"add", "cross_entropy_bwd", "cross_entropy_fwd", "dropout_bwd", "dropout_fwd", "embedding_bwd", "embedding_fwd", "moe_permute_bwd",
        "moe_permute_by_mask_fwd", "moe_permute_fwd", "moe_sort_chunks_bwd", "moe_sort_chunks_fwd", "moe_unpermute_bwd", "moe_unpermute_fwd",
        "splits_to_offsets"}
repeated = set()


def repeating(implementation):
    """The implementation such that a call runs twice, the second time by the function that repeats it, on the same contents."""
    def run(**arguments):
        tensors = [bits(t) for t in repeat.tensors_of(arguments)]
        before = [t.clone() for t in tensors]
        function = implementation.repeat(**arguments)
        if function is None:
            return
        repeated.add(implementation.op_name)
        after = [t.clone() for t in tensors]
        for t, old in zip(tensors, before):
            t.copy_(old)
        function(repeat.tensors_of(arguments))
        for at, (t, wanted) in enumerate(zip(tensors, after)):
            if not torch.equal(t.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8)):
                raise AssertionError(f"tensor {at} differs when the call is repeated")
    run.__signature__ = inspect.signature(implementation.fn)
    return dataclasses.replace(implementation, fn=run, repeat=None)


class Table(unittest.TestCase):
    def test_each_op(self):
        torch.set_num_threads(1)
        OpRegistry.instance().register_many(map(repeating, reference_torch.implementations(("cpu",))))
        self.addCleanup(OpRegistry.instance().clear)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.json")
            code = _check_worker.conformance(["--impl", "reference.torch", "--reduced", "--json", path], str(CONFORMANCE))
            results = json.loads(pathlib.Path(path).read_text())
        self.assertEqual([f"{r['case']}: {r['message']}" for r in results if r["result"] == "fail"], [])
        self.assertEqual(code, 0)
        passed = {r["op"] for r in results if r["result"] == "pass"}
        self.assertEqual(sorted({i.op_name for i in reference_torch.implementations()} - passed), [])
        self.assertEqual(sorted(passed - repeated - ONCE), [])


@unittest.skipUnless(torch.cuda.is_available() and gemm._has_grouped_mm(torch.device("cuda", 0)), "PyTorch has no GPU with products of groups")
class Groups(unittest.TestCase):
    def test_small_groups_are_one_operation(self):
        sizes = [3, 0, 17, 8, 1, 64, 5, 2, 9]
        for trans_b, columns, inner in ((True, 24, 64), (False, 8, 16)):
            rows = torch.randn(sum(sizes) + 7, inner, device="cuda", dtype=torch.bfloat16)
            results = torch.full((sum(sizes) + 7, columns), 7.0, device="cuda", dtype=torch.bfloat16)
            weights = [torch.randn(*((columns, inner) if trans_b else (inner, columns)), device="cuda", dtype=torch.bfloat16) for _ in sizes]
            a, d = list(rows[:-7].split(sizes)), list(results[:-7].split(sizes))
            self.assertTrue(gemm._in_one(a, weights, d, trans_b))
            for x, w, got in zip(a, weights, d):
                torch.testing.assert_close(got, x @ (w.t() if trans_b else w))
            self.assertTrue((results[-7:] == 7).all())
            self.assertFalse(gemm._in_one(a[:-1] + [a[-1].clone()], weights, d, trans_b))  # not behind the others in memory


class Recorded(unittest.TestCase):
    def test_what_depends_on_more_than_the_signature_is_not_repeated(self):
        x, y, other = torch.randn(4), torch.zeros(4), torch.randn(4)
        kept = torch.ones(4)
        for function in (lambda x, y: y.copy_(x * float(x[0])), lambda x, y: y.copy_(x + kept), lambda x, y: y.fill_(bool(x.sum() > 0)),
                         lambda x, y: repeat.abandon() or y.copy_(x)):
            self.assertIsNone(repeat.record("op", function, x=x, y=y))
        for function in (lambda x, y: y.copy_(x * x.shape[0] + torch.ones_like(x)), lambda x, y: y.__setitem__(slice(1, 3), x[:2]),
                         lambda x, y: torch.add(*x.view(2, 2).unbind(), out=y[:2]), lambda x, y: torch._foreach_add_([y], [x])):
            made = repeat.record("op", function, x=x, y=y)
            wanted, got = torch.zeros(4), torch.zeros(4)
            function(other, wanted)
            made([other, got])
            self.assertTrue(torch.equal(got, wanted))

    def test_autocast_changes_no_op(self):
        a, b = torch.randn(32, 64), torch.randn(16, 64)
        exact = a.double() @ b.double().t()
        implementation = next(i for i in reference_torch.implementations() if i.op_name == "generic_gemm")
        rest = {"bias": None, "pre_gelu_out": None, "pre_gelu_in": None, "bias_grad": None, "trans_a": False, "trans_b": True, "gelu": False, "accumulate": False,
                "accumulate_bias_grad": False, "use_split_accumulator": True, "alpha": 1.0, "beta": 0.0}
        for run in (implementation.fn, implementation.repeat):
            d = torch.empty(32, 16)
            with torch.autocast("cpu", torch.bfloat16):
                made = run(a=a, b=b, d=d, **rest)
            torch.testing.assert_close(d.double(), exact, rtol=1e-5, atol=1e-4)
        d.zero_()
        with torch.autocast("cpu", torch.bfloat16):
            made([a, b, d])
        torch.testing.assert_close(d.double(), exact, rtol=1e-5, atol=1e-4)

    def test_a_mode_sees_the_operations(self):
        x, y = torch.randn(4, 4), torch.zeros(4, 4)
        made = repeat.record("op", lambda x, y: torch.mm(x, x, out=y), x=x, y=y)
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            self.assertIs(made([x, y]), NotImplemented)
            self.assertFalse(callable(repeat.record("op", lambda x, y: torch.mm(x, x, out=y), x=x, y=y)))
        self.assertEqual(counter.get_total_flops(), 2 * 4**3)


if __name__ == "__main__":
    unittest.main()
