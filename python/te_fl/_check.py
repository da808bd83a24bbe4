"""python -m te_fl._check OPTIONS: the worker process that `te-fl check MODULE --python` starts and controls."""

import sys

import te_fl  # noqa: F401  (loads modules as plugins)
from te_fl import _check_worker

if __name__ == "__main__":
    sys.exit(_check_worker.serve(sys.argv[1]))
