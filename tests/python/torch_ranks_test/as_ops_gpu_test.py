"""Tests collectives of te_fl.pytorch over NCCL's group of one rank: on the current stream, asynchronously, and in a graph."""

import unittest

import torch
import torch.distributed as dist

import te_fl
from te_fl.pytorch.distributed import collectives, communicator

NCCL = "vendor.torch.nccl"


@unittest.skipUnless(torch.cuda.is_available() and dist.is_nccl_available(), "needs a GPU and NCCL")
class OnGpu(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        collectives.barrier()  # creates NCCL's communicator, for which the host waits

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()

    def test_which_implementation_runs(self):
        x = torch.ones(3, device="cuda")
        comm = communicator.of(None, x.device)
        explained = te_fl.explain("all_reduce", input=x, output=x, comm=comm)
        self.assertEqual((explained["impl_id"], explained["runs"]), (NCCL, "torch.distributed's nccl"))
        te_fl.reset_usage()
        te_fl.ops.all_reduce(input=x, output=x, comm=comm)
        collectives.barrier()
        self.assertEqual({row["op"]: row["impl_id"] for row in te_fl.usage()}, {"all_reduce": NCCL, "barrier": NCCL})

    def test_behind_the_current_stream(self):
        for later in (False, True):
            x, whole = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000)
                x.fill_(3)
                work = collectives.all_gather_into(whole, x, wait=not later)
                self.assertFalse(stream.query(), "the host has waited")
                if later:
                    work.wait()
                got = whole.sum()
            stream.synchronize()
            self.assertEqual(got.item(), 3 * (1 << 20))

    def test_codes_travel_as_bytes(self):
        codes = torch.arange(-8.0, 8.0, device="cuda").to(torch.float8_e4m3fn)
        whole = torch.empty_like(codes)
        collectives.all_gather_into(whole, codes)
        self.assertTrue(torch.equal(whole.float(), codes.float()))

    def test_in_a_graph(self):
        x, whole = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            collectives.all_gather_into(whole, x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            collectives.all_gather_into(whole, x)
        x.fill_(5)
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(whole, torch.full_like(whole, 5)))


if __name__ == "__main__":
    unittest.main()
