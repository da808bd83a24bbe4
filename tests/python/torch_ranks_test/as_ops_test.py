"""Tests collectives of te_fl.pytorch called as ops of te-fl over two ranks: values, usage and traces, policy, errors, and TE_FL_VALIDATE."""

import unittest

import torch

import as_ops_cases as cases
from ranks import on_ranks

GLOO = "vendor.torch.gloo"


class AsOps(unittest.TestCase):
    def check_equal(self, results):
        for name, (got, want) in results:
            self.assertTrue(torch.equal(got, want), (name, got, want))

    def test_what_ranks_exchange(self):
        for results in on_ranks(cases.exchanged):
            self.check_equal(results.items())

    def test_called_by_name(self):
        for results, errors in on_ranks(cases.called_as_ops):
            self.check_equal(enumerate(results))
            for error, text in zip(errors, ("TypeError: 'comm' is a int, not a communicator; te_fl.pytorch.distributed.communicator.of",
                                            "TypeError: all_reduce.*'stream' is given", "InvalidArgument(.|\n)*'comm' is missing",
                                            "InvalidArgument(.|\n)*rank 2 of a communicator of 2")):
                self.assertRegex(error, text)

    def test_explain_usage_and_trace(self):
        for explained, usage, traced in on_ranks(cases.seen):
            self.assertEqual((explained["impl_id"], explained["runs"]), (GLOO, "torch.distributed's gloo"))
            for candidate in explained["candidates"]:
                self.assertEqual(candidate["accepted"], candidate["impl_id"] == GLOO)
                self.assertRegex(candidate["reason"], "chosen" if candidate["accepted"] else "made by plugin torch.gloo")
            self.assertIn("reference.host", [c["impl_id"] for c in explained["candidates"]])
            self.assertEqual(usage, {"all_reduce": (GLOO, 2), "broadcast": (GLOO, 1), "barrier": (GLOO, 1)})
            self.assertEqual(traced, [("all_reduce", GLOO), ("broadcast", GLOO), ("all_reduce", GLOO), ("barrier", GLOO)])

    def test_policy_refuses_before_anything_is_sent(self):
        for errors, x, counts in on_ranks(cases.denied):
            for error, text in zip(errors, (f"Unsupported(.|\n)*{GLOO}(.|\n)*TE_FL_PER_OP|Unsupported(.|\n)*{GLOO}(.|\n)*per_op",
                                            f"Unsupported(.|\n)*{GLOO}(.|\n)*vendor torch is denied",
                                            f"Unsupported(.|\n)*{GLOO}(.|\n)*vendor torch is not among the allowed .TE_FL_ALLOW_VENDORS nvidia",
                                            "InvalidArgument(.|\n)*dtype must be", "InvalidArgument.*sum, max, avg",
                                            "InvalidArgument(.|\n)*output")):
                self.assertRegex(error, text)
            self.assertTrue(torch.equal(x, torch.full((2,), 2.0)))
            self.assertEqual(counts, {("all_reduce", "gloo"): (1, 8), ("broadcast", "gloo"): (1, 8)})

    def test_groups_that_are_gone(self):
        for (destroyed, gone), same, let_go in on_ranks(cases.ended):
            self.assertRegex(destroyed, "FailedPrecondition.*all_reduce.*destroyed; make a new group")
            self.assertRegex(gone, "FailedPrecondition.*all_reduce.*is gone; keep the group")
            self.assertTrue(same and let_go)

    def test_errors_of_the_group_say_which_call(self):
        (name, text, notes), _ = on_ranks(cases.own_errors)
        self.assertEqual(name, "RuntimeError")
        self.assertIn("Timed out waiting 1000ms", text)
        self.assertRegex(notes[0], r"all_reduce of float32\[4, 3\], reduction sum over gloo, as rank 0 of 2 in group '.+'")

    def test_calls_that_ranks_compare(self):
        (first, second, third), others = on_ranks(cases.compared)
        for (x, _), (y, _) in zip((first, second, third), others):
            self.assertEqual((x, y), ([4.0, 4.0], [4.0, 4.0]))
        self.assertRegex(first[1], r"CommFailed: COMM_FAILED.*rank 0 calls number 3, all_reduce of float32\[2\].*rank 1: number 3, all_reduce of float32\[3\]")
        self.assertRegex(others[0][1], r"CommFailed: COMM_FAILED.*rank 1 calls.*float32\[3\].*rank 0: .*float32\[2\]")
        self.assertRegex(second[1], "rank 0 calls number 3, broadcast.*rank 1: number 3, all_reduce")
        self.assertRegex(third[1], "CommFailed.*rank 1 did not reach number 3, all_reduce .*within 1000 ms")
        self.assertIsNone(others[2][1])

    def test_settings_that_ranks_compare(self):
        first, second = on_ranks(cases.compared_with_unlike_settings)
        self.assertRegex(first, "CommFailed.*rank 0 calls number 1, all_reduce(.|\n)*\n  policy: [^\n]* on rank 0, [^\n]*strict=1[^\n]* on rank 1")
        self.assertRegex(second, "CommFailed.*rank 1 calls number 1, all_reduce(.|\n)*\n  policy: [^\n]*strict=1[^\n]* on rank 1, [^\n]* on rank 0")

    def test_one_rank_alone_does_not_wait_to_compare(self):
        (error, took), _ = on_ranks(cases.compared_by_one)
        self.assertRegex(error, "CommFailed.*rank 0 compares.*TE_FL_VALIDATE.*rank 1 does not; set")
        self.assertLess(took, 2)


if __name__ == "__main__":
    unittest.main()
