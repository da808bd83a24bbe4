"""Runs cases on several ranks over Gloo: one launch of processes runs the cases of all files, and each case is reported as a test of its own.

usage: ranks.py RANK WORLD FOLDER. A case is a function case_..(ranks) of a file *_cases.py. TEST_RANKS says how many processes; default 2.
"""

import datetime
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback

HERE = pathlib.Path(__file__).resolve().parent
WORLD = int(os.environ.get("TEST_RANKS", "2"))


def cases():
    """Returns the cases by name, in the order in which all ranks run them."""
    found = {}
    for path in sorted(HERE.glob("*_cases.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        found.update({f"{path.stem.removesuffix('_cases')}_{name[5:]}": function for name, function in vars(module).items() if name.startswith("case_")})
    return found


class Ranks:
    """The ranks of one launch, seen from one of them."""

    def __init__(self, rank, world, folder):
        import torch.distributed as dist
        self.rank, self.world, self.folder = rank, world, folder
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
        # Groups of consecutive ranks, as Megatron makes them, and groups of the ranks with the same position in each.
        self.groups, self.across = {}, {}
        for size in (n for n in (1, 2, 4) if world % n == 0):
            for first in range(0, world, size):
                group = dist.new_group(list(range(first, first + size)))
                if first <= rank < first + size:
                    self.groups[size] = group
            for place in range(size):
                group = dist.new_group(list(range(place, world, size)))
                if rank % size == place:
                    self.across[size] = group

    def degrees(self):
        """Returns the tensor-parallel degrees above 1."""
        return [n for n in self.groups if n > 1]


def main():
    import torch
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from gloo_threads import let_them_end
    torch.set_num_threads(1)
    let_them_end()
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ranks, wrong = Ranks(rank, world, folder), {}
    for name, case in cases().items():
        torch.manual_seed(1)
        try:
            case(ranks)
        except Exception:
            wrong[name] = traceback.format_exc()
    pathlib.Path(folder, f"wrong{rank}.json").write_text(json.dumps(wrong))
    torch.distributed.destroy_process_group()


def launched():
    """Launches the ranks and runs the cases; returns the errors by case name, with the rank that failed."""
    from forkserver import PYTHON
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([*PYTHON, __file__, str(rank), str(WORLD), folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                      env=environment) for rank in range(WORLD)]
        try:
            outputs = [p.communicate(timeout=600)[0] for p in processes]
        finally:
            for p in processes:
                p.kill()
        wrong = {}
        for rank, (process, text) in enumerate(zip(processes, outputs)):
            path = pathlib.Path(folder, f"wrong{rank}.json")
            if process.returncode != 0 or not path.exists():
                raise AssertionError(f"rank {rank} ended with {process.returncode}:\n{text}")
            for name, error in json.loads(path.read_text()).items():
                wrong.setdefault(name, f"rank {rank}:\n{error}")
        return wrong


if __name__ == "__main__":
    main()
