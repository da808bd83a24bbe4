"""`python -m te_fl COMMAND`, also installed as the command te-fl. Runs the C++ program te-fl with the same arguments. The commands of HERE run in this
process, so that implementations in Python and devices of PyTorch take part. Four commands differ: doctor and info also report on Python and its
frameworks, build-node compiles te_fl.pytorch's autograd node, and launch starts the ranks of a job.
"""

import os
import signal
import subprocess
import sys

from te_fl import doctor, torch_node
from te_fl.program import program, run_here

HERE = ("bench", "explain", "info", "ops", "replay", "tune")


def main() -> int:
    words = sys.argv[1:]
    if words[:1] in (["doctor"], ["info"]) and set(words[1:]) <= {"--json"}:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe (`| head`) ends the process silently, as with the program te-fl
        return getattr(doctor, words[0])("--json" in words)
    if words[:1] == ["launch"]:  # a program of its own, because it handles signals and waits for processes
        launch = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launch.py")
        os.execv(sys.executable, [sys.executable, launch, *words[1:]])
    if words == ["build-node"]:
        return torch_node.build()
    if words[:1] == ["build-node"]:
        asked = words[1:] in (["--help"], ["-h"])
        print("te-fl build-node compiles te_fl.pytorch's node of autograd for the installed PyTorch (docs/pytorch.md); CXX names the compiler. "
              "It takes no arguments" + ("." if asked else f", and '{words[1]}' is given."), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        if words in (["--help"], ["-h"]):
            status = subprocess.run([program(), *words]).returncode
            print("\nWith the Python package also:\n  build-node                  Compiles te_fl.pytorch's node of autograd for the installed PyTorch\n"
                  "  launch                      Starts the ranks of a job on this machine: te-fl launch -n 4 -- PROGRAM")
            return status
        if words[:1] and words[0] in HERE and not {"--help", "-h"} & set(words):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            return run_here(words)
        os.execv(program(), ["te-fl", *words])
    except FileNotFoundError as error:
        print(f"te-fl: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
