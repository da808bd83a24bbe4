"""python -m te_fl._check OPTIONS: started by `te-fl check MODULE --python`, whose orders it serves."""

import sys

import te_fl  # noqa: F401  (loads modules as plugins)
from te_fl import _check_worker

if __name__ == "__main__":
    sys.exit(_check_worker.serve(sys.argv[1]))
