"""Tests that two ranks reduce their amaxes in the fewest collectives. Tests groups that were destroyed, forked, used by non-members, or whose ranks
fail."""

import os
import signal
import subprocess
import unittest
from unittest import mock

import trouble_cases as cases
from ranks import Ranks, on_ranks
from te_fl.pytorch.distributed import ended_ranks


class Amaxes(unittest.TestCase):
    def test_one_collective_a_direction(self):
        first, second = on_ranks(cases.amaxes)
        for name in first:
            one = {"all_reduce": 1} if name == "delayed" else {}
            for taken, _ in (first[name], second[name]):
                self.assertEqual(taken, [(one, one)] * 2, name)
        self.assertEqual(first["delayed"][1], second["delayed"][1])
        self.assertNotEqual(first["alone"][1], second["alone"][1])
        self.assertEqual(len(first["delayed"][1]), 24)


class Trouble(unittest.TestCase):
    def test_a_destroyed_group(self):
        for errors in on_ranks(cases.destroyed_group):
            for error in errors:
                self.assertRegex(error, "(?s)FAILED_PRECONDITION: .*all_.*destroyed; make a new group")

    def test_a_group_that_nothing_keeps(self):
        for stay, error in on_ranks(cases.groups_that_stay):
            self.assertEqual([kind for kind, stays in stay.items() if stays], [])
            self.assertRegex(error, "the process group whose ranks share the amaxes of an autocast is gone")

    def test_what_layers_raise(self):
        for types in on_ranks(cases.raised_by_layers):
            self.assertEqual(types, ["CommFailed", "CommFailed", "KeyboardInterrupt"])

    def test_collectives_that_fail_in_layers(self):
        for rank, found in enumerate(on_ranks(cases.failed_in_layers)):
            self.assertEqual(len(found), 5)
            for name, (kind, text) in found.items():
                self.assertRegex(text, rf"number \d+, {name.split()[0]} of float32\[.*as rank {rank} of 2", name)
                self.assertIn("the network is gone", text, name)
                # If Python calls the collectives for a layer, the layer raises PyTorch's own error, with a note.
                self.assertEqual(kind, "RuntimeError" if name == "all_reduce of a layer" else "CommFailed", (name, text))
                self.assertEqual(text.count("COMM_FAILED"), int(kind == "CommFailed"), text)

    def test_a_group_of_others(self):
        inside, outside = on_ranks(cases.outside)
        self.assertIsNone(inside)
        self.assertRegex(outside, "InvalidArgument.*is a process group of other ranks.*NON_GROUP_MEMBER")

    def test_a_fork_after_init(self):
        for error in on_ranks(cases.forked):
            self.assertRegex(error, "FailedPrecondition.*forked after torch.distributed.init_process_group")

    def test_a_killed_rank(self):
        job = Ranks(3)  # a launch of its own, because the killed rank does not come back
        self.addCleanup(job.close)
        first, killed, last = job.call("trouble_cases", "killed", killed=(1,))
        self.assertEqual((killed, job.processes[1].wait(20)), (None, -signal.SIGKILL))
        for rank, (failure, result) in ((0, first), (2, last)):
            self.assertIsNone(failure)
            (text, notes), (waited, wait_notes), seconds, process = result
            self.assertRegex(text, "RuntimeError: (.|\n)*[Cc]onnection")
            words = (rf"te-fl: in number 4, all_reduce of float32\[4, 3\], reduction sum over gloo, as rank {rank} of 3 in group '.+'"
                     rf"; rank 1 has ended \(its process {process} is gone\)$")
            self.assertRegex("\n".join(notes), words)
            self.assertRegex(waited, "RuntimeError")
            self.assertRegex("\n".join(wait_notes), words.replace("number 4", "number 5").replace(r"all_reduce of float32\[4, 3\], reduction sum",
                                                                                               r"all_gather of float32\[2, 4\]"))
            self.assertLess(seconds, 20, "nobody waits for the group's time limit, which is a minute")

    def test_ranks_that_end(self):
        job = Ranks(1 + len(cases.ENDS))
        self.addCleanup(job.close)
        (failure, found), *_ = job.call("trouble_cases", "ended", killed=range(1, 1 + len(cases.ENDS)))
        self.assertIsNone(failure)
        self.assertEqual(len(found), len(cases.ENDS))
        for rank, (text, notes, process) in enumerate(found, 1):
            self.assertRegex(text, "RuntimeError: (.|\n)*[Cc]onnection")
            who = "rank 1" if rank == 1 else rf"rank 1 \({rank} of the default group\)"
            self.assertRegex("\n".join(notes), rf"as rank 0 of 2 in group '.+'; {who} has ended \(its process {process} is gone\)$")

    def test_a_store_that_is_gone(self):
        """Tests a store whose server, rank 0's process, has ended; and a process id that another process has got since then."""
        gone = subprocess.Popen(["true"])
        here, own = ended_ranks._machine(), os.getpid()
        gone.wait()
        store = mock.Mock(check=mock.Mock(side_effect=RuntimeError("Broken pipe")))
        for mark, want in ((f"{here} {gone.pid} 1", [(0, gone.pid)]), (f"{here} {own} 1", [(0, own)]),
                           (f"{here} {own} {ended_ranks._start_of(own)}", []), (f"elsewhere {here} {gone.pid} 1", []), ("", [])):
            found = []
            ended_ranks._look(store, [0, 1], {0: mark}, found, 0.0)
            self.assertEqual(found, want, mark)

    def test_an_error_in_the_backward_of_one_rank(self):
        (waits, seconds), (raises, _) = on_ranks(cases.error_in_a_backward)
        self.assertRegex(waits, "the ranks' amaxes were not reduced(.|\n)*Timed out waiting 2000ms")
        self.assertLess(seconds, 20)
        self.assertRegex(raises, "ZeroDivisionError")


if __name__ == "__main__":
    unittest.main()
