"""Tests that a program started by forkserver.py behaves as in an interpreter of its own; under ctest it is a fork that has PyTorch."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

from forkserver import PYTHON


def run(*arguments, **options):
    return subprocess.run([*PYTHON, *arguments], capture_output=True, text=True, timeout=300, **options)


class Programs(unittest.TestCase):
    def test_an_end_is_the_callers(self):
        for program, status in (("pass", 0), ("import sys; sys.exit(3)", 3), ("raise ValueError('lost')", 1), ("import os; os._exit(77)", 77),
                                ("import os; os.abort()", -signal.SIGABRT), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
                                ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT)):
            with self.subTest(program):
                done = run("-c", program)
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertEqual("ValueError: lost" in done.stderr, status == 1)

    def test_what_a_program_has(self):
        with tempfile.TemporaryDirectory() as folder:
            beside, place = pathlib.Path(folder, "beside"), pathlib.Path(folder, "place")
            beside.mkdir()
            place.mkdir()
            (beside / "own.py").write_text("ANSWER = 42\n")
            program = place / "program.py"
            program.write_text("import atexit, os, pickle, sys, own\natexit.register(print, 'end')\nclass Own: pass\nassert pickle.loads(pickle.dumps(Own())).__class__ is Own\n"
                               "print(own.ANSWER, sys.argv[1:], input(), os.getcwd(), os.environ['FOR_ME'], 'HOME' in os.environ, __name__, __file__, sys.path[0])\n")
            environment = {k: v for k, v in os.environ.items() if k != "HOME"}
            done = run(str(program), "a", "-b", input="a line\n", cwd=folder, env={**environment, "FOR_ME": "yes", "PYTHONPATH": str(beside)})
            self.assertEqual(done.stdout, f"42 ['a', '-b'] a line {os.path.realpath(folder)} yes False __main__ {program} {place}\nend\n", done.stderr)

    def test_it_is_a_fork_under_ctest(self):
        done = run("-c", "import sys; print('torch' in sys.modules)")
        self.assertEqual(done.stdout, f"{'TEST_FORKSERVER' in os.environ}\n")
        self.assertEqual("torch" in sys.modules, "TEST_FORKSERVER" in os.environ)

    @unittest.skipUnless("TEST_FORKSERVER" in os.environ, "there is no server")
    def test_a_program_ends_with_its_caller(self):
        caller = subprocess.Popen([*PYTHON, "-c", "import subprocess, time; print('runs', flush=True); subprocess.run(['sleep', '100'])"], stdout=subprocess.PIPE)
        self.assertEqual(caller.stdout.readline(), b"runs\n")
        caller.kill()
        self.assertEqual(caller.communicate(timeout=120), (b"", None))  # all other ends of the pipe are closed


if __name__ == "__main__":
    unittest.main()
