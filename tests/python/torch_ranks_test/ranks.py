"""Runs functions of a test on several ranks: processes connected by Gloo, started once for all tests of the folder.

usage, by itself: ranks.py RANK RANKS STORE. Reads "MODULE FUNCTION FILE" lines, calls the function, and writes (error, result) to the file.
"""

import atexit
import datetime
import importlib
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback

FOLDER = pathlib.Path(__file__).resolve().parent
_started = {}


class Ranks:
    def __init__(self, count):
        from forkserver import PYTHON
        self.folder = tempfile.TemporaryDirectory()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = [subprocess.Popen([*PYTHON, __file__, str(rank), str(count), f"{self.folder.name}/store"], env=environment,
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for rank in range(count)]
        self.calls = 0

    def call(self, module, function, killed=()):
        """Calls the function on all ranks; returns each rank's (error, result). `killed`: ranks that the function kills, whose entry is None."""
        self.calls += 1
        files = [f"{self.folder.name}/{self.calls}.{rank}" for rank in range(len(self.processes))]
        for process, file in zip(self.processes, files):
            process.stdin.write(f"{module} {function} {file}\n")
            process.stdin.flush()
        for rank, process in enumerate(self.processes):
            line = process.stdout.readline()
            while line.startswith("[Gloo]"):  # PyTorch 2.9 reports each connection on the standard output
                line = process.stdout.readline()
            if not line and rank not in killed:
                raise RuntimeError(f"a rank ended in {module}.{function}() with {process.wait()}")
        return [None if rank in killed else load(file) for rank, file in enumerate(files)]

    def close(self):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self.folder.cleanup()


def load(file):
    import torch
    return torch.load(file, weights_only=False)


def on_ranks(function, count=2):
    """Runs function() on `count` ranks and returns the results; raises the first rank's error, as text."""
    if count not in _started:
        _started[count] = Ranks(count)
        atexit.register(_started[count].close)
    results = _started[count].call(function.__module__, function.__name__)
    for rank, (error, _) in enumerate(results):
        if error:
            raise AssertionError(f"rank {rank} of {count}: {error}")
    return [result for _, result in results]


def serve(rank, count, store):
    import torch
    import torch.distributed as dist
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    from gloo_threads import let_them_end
    let_them_end()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=datetime.timedelta(seconds=60))
    for line in sys.stdin:
        module, function, file = line.split()
        try:
            answer = (None, getattr(importlib.import_module(module), function)())
        except SystemExit:
            raise
        except BaseException:
            answer = (traceback.format_exc(), None)
        torch.save(answer, file)
        print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
