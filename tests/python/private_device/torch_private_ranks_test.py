"""Tests te_fl.pytorch on a process group of a vendor's own backend: two processes, each with PrivateUse1 devices (far.py) whose collectives run on
streams of their own (ranks.cpp).

usage, as a rank: torch_private_ranks_test.py RANK FOLDER. Runs each function of CASES, and writes {name: (error, result)} to FOLDER/RANK.
"""

import contextlib
import datetime
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import far  # noqa: E402
from forkserver import PYTHON  # noqa: E402

import te_fl  # noqa: E402
import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling  # noqa: E402
from te_fl.pytorch.distributed import collectives, communicator  # noqa: E402
from torch_cases import scope  # noqa: E402
from torch_oracle import randn, randomise  # noqa: E402

FAR, RANKS, STEPS = "far:0", 2, 3
# Current scaling is left out: a rank scales a tensor by the largest element of its own part.
RECIPES = {"none": None, "delayed": DelayedScaling(amax_history_len=2), "block": Float8BlockScaling()}


def make(device, **options):
    """Returns a model with the same values on each device."""
    model = torch.nn.Sequential(te.LayerNormLinear(32, 32, device="cpu", **options),
                                te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, device="cpu", **options))
    return randomise(model).to(device)


def data(step):
    return randn(8, 4, 32, seed=step)


def train(model, recipe, device, rank=None, stream=None):
    """Trains on one rank's part of the data, or on all of it as RANKS ranks would that average gradients. Returns losses. stream: one of the device,
    for all but the backward, which a program may call on another stream."""
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3, eps=1e-4)  # above the noise of gradients that are zero in exact arithmetic
    losses = []

    def on_stream():
        if stream is None:
            return contextlib.nullcontext()
        stream.wait_stream(torch.accelerator.current_stream())
        return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    for step in range(STEPS):
        x = data(step)
        if rank is not None:
            x = x.chunk(RANKS, dim=1)[rank].contiguous()
        with on_stream(), scope(recipe):
            loss = model(x.to(device)).square().sum() / data(step).numel()  # divided by the elements of all ranks' data, so that ranks' gradients sum to those of one process
        loss.backward()
        with on_stream():
            if rank is None:
                for p in model.parameters():
                    p.grad /= RANKS
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
    return torch.stack(losses)


def scales(model):
    """Returns the FP8 scales of a model that delayed scaling keeps."""
    found = [t.detach().cpu() for m in model.modules() if hasattr(m, "_fp8_state") for n, t in m._fp8_state() if n.endswith("scale")]
    return torch.cat([t.flatten() for t in found]) if found else torch.empty(0)


def whole(model):
    return {n: (p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()).cpu() for n, p in model.named_parameters()}


def wrapped(how, **options):
    model = make(FAR, **options)
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("far", (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# ---- what each rank runs

def training(rank, _):
    """Returns by wrapper and recipe: losses summed over the ranks, parameters, and scales. The work runs on a stream that queues."""
    results = {}
    for how in ("ddp", "fsdp"):
        for name, recipe in RECIPES.items():
            model, stream = wrapped(how), torch.Stream(device=FAR)
            losses = train(model, recipe, FAR, rank, stream)
            torch.accelerator.current_stream().wait_stream(stream)
            inner = model.module if how == "ddp" else model
            results[how, name] = losses, whole(inner), scales(inner)
    return results


def reductions(rank, _):
    """Returns the collectives of a step in FP8, and how te-fl chooses for one of them."""
    model = wrapped("ddp")
    collectives.reset_counts()
    train(model, RECIPES["delayed"], FAR, rank)
    x = torch.ones(4, device=FAR)
    found = te_fl.explain("all_reduce", comm=communicator.of(None, x.device), input=x, output=x)
    return {key: count.calls for key, count in collectives.counts().items()}, [c["impl_id"] for c in found["candidates"] if c["accepted"]]


def checkpoints(rank, folder):
    """Loads what the CPU saved, trains, saves; returns outputs before and after."""
    model = wrapped("fsdp")
    with scope(RECIPES["delayed"]):
        model(data(9).to(FAR)).sum().backward()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/from_cpu")
    model.load_state_dict(state["model"])
    model.zero_grad()

    def output():
        with torch.no_grad(), scope(RECIPES["delayed"]):
            return model(data(10).to(FAR)).cpu()
    before = output()
    train(model, RECIPES["delayed"], FAR, rank)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/from_far")
    return before, output()


def ops(rank, _):
    """Returns the results of te-fl's collectives on a stream that queues."""
    results = {}
    torch.accelerator.synchronize()
    with torch.Stream(device=FAR):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.zeros(4, device=FAR, dtype=dtype)
            x.copy_(torch.arange(4.0) + 10 * rank)
            for reduction in ("sum", "max", "avg"):
                y = x.clone()
                collectives.all_reduce(y, op=reduction)
                results[dtype, reduction] = y.cpu()
            gathered, part, swapped = torch.empty(8, device=FAR, dtype=dtype), torch.empty(2, device=FAR, dtype=dtype), torch.empty(4, device=FAR, dtype=dtype)
            collectives.all_gather_into(gathered, x)
            collectives.reduce_scatter_into(part, x)
            collectives.all_to_all(swapped, x)
            works = [collectives.all_reduce(t, wait=False) for t in (x,)]
            for work in works:
                work.wait()
            results[dtype, "moved"] = [t.cpu() for t in (gathered, part, swapped, x)]
        codes = (torch.arange(4.0) + rank).to(FAR).to(torch.float8_e4m3fn)
        gathered = torch.empty(8, device=FAR, dtype=torch.float8_e4m3fn)
        collectives.all_gather_into(gathered, codes)
        results["codes"] = gathered.float().cpu()
        late = torch.zeros(2, device=FAR)
        if rank == 0:
            collectives.send(torch.ones(2, device=FAR) * 3, 1)
        else:
            collectives.receive(late, 0)
        collectives.broadcast(late, 1)
        results["sent"] = late.cpu()
    collectives.barrier()
    return results


CASES = {f.__name__: f for f in (training, reductions, checkpoints, ops)}


def serve(rank, folder):
    far.start()
    far.ranks()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,far:far_ccl", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS,
                            timeout=datetime.timedelta(seconds=60))
    results = {}
    for name, case in CASES.items():
        try:
            results[name] = None, case(rank, folder)
        except Exception:
            results[name] = traceback.format_exc(), None
            break  # the other rank waits
    torch.save(results, f"{folder}/{rank}")
    dist.destroy_process_group()


class Ranks(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        far.compiled("backend"), far.ranks_library()  # not by both ranks at once
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        folder = temporary.name
        cls.folder = pathlib.Path(folder)
        cls.here = make("cpu")
        train(cls.here, RECIPES["delayed"], "cpu")
        dcp.save({"model": cls.here.state_dict()}, checkpoint_id=f"{folder}/from_cpu")
        processes = [subprocess.Popen([*PYTHON, __file__, str(rank), folder], env={**os.environ, "FAR_ALONE": "1"}, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True) for rank in range(RANKS)]
        outputs = [process.communicate(timeout=600)[0] for process in processes]
        cls.ends = [process.returncode for process in processes]
        cls.results = [torch.load(cls.folder / str(rank), weights_only=False) if (cls.folder / str(rank)).exists() else {} for rank in range(RANKS)]
        cls.output = "\n".join(outputs)

    def result(self, name):
        for results in self.results:
            error, _ = results.get(name, (self.output, None))
            self.assertIsNone(error, error)
        return [results[name][1] for results in self.results]

    def near(self, got, want, message, tolerance=2e-5):
        error = (got.double() - want.double()).abs().max() / want.double().abs().max()
        self.assertLess(float(error), tolerance, message)

    def test_the_ranks_end(self):
        self.assertEqual(self.ends, [0] * RANKS, self.output)

    def test_training_is_that_of_one_process(self):
        first, second = self.result("training")
        for name, recipe in RECIPES.items():
            here = make("cpu")
            losses = train(here, recipe, "cpu")
            for how in ("ddp", "fsdp"):
                with self.subTest(how=how, recipe=name):
                    self.near(first[how, name][0] + second[how, name][0], losses, "losses")
                    self.assertEqual(list(first[how, name][1]), list(whole(here)))
                    for n, want in whole(here).items():
                        self.near(first[how, name][1][n], want, n)
                        self.assertTrue(torch.equal(first[how, name][1][n], second[how, name][1][n]), n)
                    self.assertTrue(torch.equal(first[how, name][2], second[how, name][2]))  # the ranks have reduced their amaxes
                    self.assertTrue(torch.allclose(first[how, name][2], scales(here), rtol=1e-4), (first[how, name][2], scales(here)))
            self.assertEqual(len(scales(here)) > 0, name == "delayed")

    def test_delayed_scaling_reduces_its_amaxes_by_the_vendor_s_backend(self):
        for counts, chosen in self.result("reductions"):
            self.assertEqual(counts, {("all_reduce", "far_ccl"): 2 * STEPS})
            self.assertEqual(chosen, ["vendor.torch.far_ccl.far"])

    def test_checkpoints_load_on_the_cpu_and_back(self):
        """The shards of two devices load what one process on the CPU saved, and the CPU loads what they have trained."""
        there = make("cpu")
        with scope(RECIPES["delayed"]):
            there(data(9)).sum().backward()
        state = {"model": there.state_dict()}
        dcp.load(state, checkpoint_id=f"{self.folder}/from_far")
        there.load_state_dict(state["model"])
        for results in self.result("checkpoints"):
            for model, got in zip((self.here, there), results):
                with torch.no_grad(), scope(RECIPES["delayed"]):
                    self.near(got, model(data(10)), "outputs")
            self.assertFalse(torch.equal(*results))

    def test_collectives_on_a_stream_that_queues(self):
        for rank, results in enumerate(self.result("ops")):
            parts = [torch.arange(4.0) + 10 * r for r in range(RANKS)]
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for reduction, want in (("sum", parts[0] + parts[1]), ("max", parts[1]), ("avg", (parts[0] + parts[1]) / 2)):
                    self.assertTrue(torch.equal(results[dtype, reduction], want.to(dtype)), (dtype, reduction))
                want = [torch.cat(parts), (parts[0] + parts[1]).chunk(RANKS)[rank], torch.cat([p.chunk(RANKS)[rank] for p in parts]), parts[0] + parts[1]]
                for got, expected in zip(results[dtype, "moved"], want):
                    self.assertTrue(torch.equal(got, expected.to(dtype)), dtype)
            self.assertEqual(results["codes"].tolist(), [0, 1, 2, 3, 1, 2, 3, 4])
            self.assertEqual(results["sent"].tolist(), [3, 3])


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        serve(int(sys.argv[1]), sys.argv[2])
    else:
        unittest.main()
