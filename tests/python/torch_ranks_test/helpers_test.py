"""Tests te.pytorch.distributed, Transformer Engine's helpers, on two ranks and without ranks."""

import unittest

import torch

import helpers_cases as cases
from ranks import on_ranks
import te_fl.pytorch as te
from te_fl.errors import AlreadyExists, FailedPrecondition, Unsupported
from te_fl.pytorch import distributed as helpers


class Helpers(unittest.TestCase):
    def test_what_ranks_exchange(self):
        for results, errors in on_ranks(cases.exchange):
            for name, (got, want) in results.items():
                self.assertTrue(torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want, (name, got, want))
            for error, text in zip(errors, ("InvalidArgument.*first extent of 5, which 2 ranks", "InvalidArgument.*elements of 5, which 2 ranks",
                                            "Unsupported.*multimem_all_reduce.*'nccl'", "Unsupported.*quantizer")):
                self.assertRegex(error, text)

    def test_what_is_no_group_is_named(self):
        ways_out = {"mesh": r"a DeviceMesh.*one dimension of it: get_group\(NAME\)", "tensor": "a DTensor.*its device_mesh", "others": "NON_GROUP_MEMBER"}
        for errors in on_ranks(cases.no_groups):
            for (kind, argument), error in errors.items():
                with self.subTest(kind=kind, argument=argument):
                    self.assertRegex(error, f"(Unsupported|InvalidArgument): .*{argument}.*{ways_out[kind]}")

    def test_tensors_of_several_ranks_are_named(self):
        for errors in on_ranks(cases.tensors_of_ranks):
            for name, error in errors.items():
                self.assertRegex(str(error), r"Unsupported.*DTensor.*to_local\(\)", name)

    def test_modules_know_the_group_of_their_fsdp(self):
        for groups, errors in on_ranks(cases.prepared_for_fsdp):
            self.assertEqual(groups, [True, None])
            for error, text in zip(errors, ("is a Sequential; it is wrapped by", "is a FSDPLinear; .*fully_shard.. needs no such call", "is a int; it is wrapped by")):
                self.assertRegex(error, "TypeError: .*" + text)

    def test_inputs_of_a_checkpoint_in_parts(self):
        for results in on_ranks(cases.recomputed):
            for name, got in results.items():
                self.assertEqual(got, (True, 1, False), name)

    def test_without_ranks(self):
        x = torch.ones(3, 2)
        self.assertEqual(helpers.get_distributed_world_size(), 1)
        with self.assertRaisesRegex(FailedPrecondition, "init_process_group"):
            helpers.get_distributed_rank()
        for call in (helpers.allreduce, helpers.symmetric_all_reduce):
            self.assertIs(call(x)[0], x)
        for call in (helpers.gather_along_first_dim, helpers.reduce_scatter_along_first_dim):
            self.assertIs(call(x, None)[0], x)
        with self.assertRaisesRegex(FailedPrecondition, "init_process_group"):
            te.checkpoint(te.Linear(2, 2, device="cpu"), x, distribute_saved_activations=True)

    def test_weights_of_tensor_parallel_layers(self):
        weight, tracker = torch.empty(4, 3), helpers.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 11)
        helpers.initialize_affine_weight_gpu(weight, torch.nn.init.normal_, lambda: tracker, partition_dim=1, stride=2)
        self.assertEqual((weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride), (True, 1, 2))
        self.assertTrue(torch.equal(weight, torch.empty(4, 3).normal_(generator=torch.Generator().manual_seed(11))))
        with self.assertRaisesRegex(AlreadyExists, "tensor_model_parallel"):
            helpers.set_tensor_model_parallel_attributes(weight, True, 0, 1)

    def test_questions(self):
        self.assertTrue(helpers.has_te_modules(torch.nn.Sequential(te.LayerNorm(4, device="cpu"))))
        self.assertTrue(helpers.has_te_modules(lambda x: x))
        self.assertFalse(helpers.has_te_modules(torch.nn.Linear(2, 2)))
        self.assertFalse(helpers.use_reentrant_activation_recompute() or helpers.HAS_TORCH_SYMMETRIC)
        seen = []

        def function(x):
            seen.append((helpers.is_fp8_activation_recompute_enabled(), helpers.in_fp8_activation_recompute_phase()))
            return x.sin()  # autograd saves x, so the backward runs the function again
        with te.autocast():
            te.checkpoint(function, torch.ones(2, requires_grad=True)).sum().backward()
        self.assertEqual([s[1] for s in seen], [False, True])
        self.assertTrue(seen[0][0])
        first, second = helpers.get_activation_recompute_contexts()
        with second:
            self.assertTrue(helpers.in_fp8_activation_recompute_phase())
        self.assertFalse(helpers.in_fp8_activation_recompute_phase())

    def test_refused_names(self):
        import te_fl
        te_fl.as_transformer_engine()
        import transformer_engine.pytorch.distributed as theirs
        self.assertIs(theirs.allreduce, helpers.allreduce)
        for name in ("FullyShardedDataParallel", "symm_mem_alloc"):
            with self.assertRaisesRegex(Unsupported, f"{name} is not supported.*(fully_shard|allreduce)"):
                getattr(theirs, name)(1)
        with self.assertRaisesRegex(AttributeError, "fully_shard"):
            helpers.FullyShardedDataParallel


if __name__ == "__main__":
    unittest.main()
