#!/usr/bin/env python3
"""Tests tools/launch.py: the environment of the ranks, how output and exit codes are returned, and that no rank is left running."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import unittest

TOOL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "launch.py")
RANK = 'import os, signal, sys, time; rank = int(os.environ["TE_FL_RANK"])\n'


class Launch(unittest.TestCase):
    def begin(self, *words):
        return subprocess.Popen([sys.executable, TOOL, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self, run):
        out, err = run.communicate(timeout=30)
        return run.returncode, out, err

    def launch(self, ranks, program, *words):
        return self.end(self.begin("-n", str(ranks), *words, "--", sys.executable, "-c", RANK + program))

    def gone(self, pid):
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    def wait_until(self, condition):
        deadline = time.monotonic() + 20
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertTrue(condition())

    def test_ranks_are_given_their_numbers(self):
        code, out, err = self.launch(3, 'print(*(os.environ["TE_FL_" + n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "STORE")))')
        self.assertEqual((code, err), (0, ""))
        lines = sorted(out.splitlines())
        stores = {line.rsplit(" ", 1)[1] for line in lines}
        self.assertEqual([line.rsplit(" ", 1)[0] for line in lines], [f"[{r}] {r} 3 {r}" for r in range(3)])
        self.assertEqual(len(stores), 1)
        store = stores.pop()
        self.assertTrue(store.startswith("file:/"))
        self.assertFalse(os.path.exists(os.path.dirname(store.removeprefix("file:"))))  # the launcher removes the folder at the end

    def test_stores(self):
        program = 'print(os.environ["TE_FL_STORE"])'
        _, out, _ = self.launch(1, program, "--store", "tcp")
        port = int(re.fullmatch(r"\[0\] tcp://127.0.0.1:(\d+)\n", out).group(1))
        socket.create_server(("127.0.0.1", port)).close()
        self.assertEqual(self.launch(1, program, "--store", "tcp://node0:29500")[1], "[0] tcp://node0:29500\n")

    def test_output_goes_where_it_was_written_line_by_line(self):
        code, out, err = self.launch(1, 'print("a"); print("b", file=sys.stderr); sys.stdout.write("no end of line")')
        self.assertEqual((code, out, err), (0, "[0] a\n[0] no end of line\n", "[0] b\n"))

    def test_first_failure_is_the_exit_code(self):
        code, _, err = self.launch(3, 'time.sleep(0.3 * (rank != 1)); sys.exit([13, 5, 0][rank])')
        self.assertEqual(code, 5)
        self.assertIn("rank 1 failed first: it ended with exit code 5; rank 0 ended with exit code 13\n", err)

    def test_a_killed_rank_is_named_with_its_signal(self):
        code, _, err = self.launch(2, 'os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(0.3)')
        self.assertEqual(code, 128 + signal.SIGKILL)
        self.assertIn("rank 1 failed first: it was ended by SIGKILL\n", err)

    def test_ranks_that_do_not_end_are_ended(self):
        start = time.monotonic()
        code, _, err = self.launch(2, 'sys.exit(3) if rank == 0 else time.sleep(60)', "--grace", "0.2")
        self.assertLess(time.monotonic() - start, 10)
        self.assertEqual(code, 3)
        self.assertIn("rank 0 ended with exit code 3; the others have 0.2 s to end\n", err)
        self.assertIn("rank 1 has not ended; sending SIGTERM\n", err)
        self.assertIn("rank 1 was ended by SIGTERM\n", err)

    def started(self, on_interrupt="sys.exit(7)"):
        """Starts a launcher whose two ranks run until they are interrupted; returns the launcher and the ranks' process ids."""
        program = f"signal.signal(signal.SIGINT, lambda *_: {on_interrupt})\nprint(os.getpid())\nwhile True: time.sleep(60)"
        run = self.begin("-n", "2", "--grace", "20", "--", sys.executable, "-c", RANK + program)
        pids = [int(run.stdout.readline().split()[1]) for _ in range(2)]
        return run, pids

    def test_interrupts_are_passed_on(self):
        run, _ = self.started()
        run.send_signal(signal.SIGINT)
        self.assertEqual(self.end(run)[0], 7)

    def test_a_second_interrupt_kills(self):
        run, pids = self.started('print("deaf")')
        run.send_signal(signal.SIGINT)
        self.assertIn("deaf", run.stdout.readline())
        run.send_signal(signal.SIGINT)
        self.assertEqual(self.end(run)[0], 128 + signal.SIGKILL)
        self.assertTrue(all(map(self.gone, pids)))

    def test_no_rank_outlives_a_killed_launcher(self):
        run, pids = self.started()
        run.kill()
        self.end(run)
        self.wait_until(lambda: all(map(self.gone, pids)))

    def test_wrong_arguments(self):
        for words, text in ((("-n", "2"), "no program is given"), (("-n", "0", "--", "true"), "at least one rank"),
                            (("-n", "1", "--store", "ftp:x", "--", "true"), "--store ftp:x"), (("--", "true"), "-n")):
            code, _, err = self.end(self.begin(*words))
            self.assertEqual(code, 2)
            self.assertIn(text, err)
        code, _, err = self.end(self.begin("-n", "2", "--", "/no/such/program"))
        self.assertEqual(code, 127)
        self.assertIn("/no/such/program cannot be started: No such file", err)


if __name__ == "__main__":
    unittest.main()
