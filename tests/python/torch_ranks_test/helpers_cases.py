"""The functions that each rank runs for helpers_test.py."""

import gc
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import te_fl.pytorch as te
from te_fl import ops
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.pytorch import distributed as helpers
from te_fl.pytorch.distributed import collectives


def catch_error(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def exchange():
    """Returns each helper's result and its expected value."""
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    mine = torch.arange(12.0).view(6, 2) + 100 * rank
    every = [torch.arange(12.0).view(6, 2) + 100 * r for r in range(ranks)]
    total = sum(every)
    results = {"size": (helpers.get_distributed_world_size(), ranks), "rank": (helpers.get_distributed_rank(world), rank),
               "gather": (helpers.gather_along_first_dim(mine, world)[0], torch.cat(every)),
               "reduce_scatter": (helpers.reduce_scatter_along_first_dim(mine, world)[0], total.chunk(ranks)[rank]),
               "allreduce": (helpers.allreduce(mine.clone(), None)[0], total),
               "symmetric": (helpers.symmetric_all_reduce(mine.clone(), world, all_reduce_type="nccl")[0], total),
               "split": (helpers.split_tensor_into_1d_equal_chunks(mine, world), mine.view(-1).chunk(ranks)[rank]),
               "gather split": (helpers.gather_split_1d_tensor(mine.view(-1), world), torch.cat(every).view(-1))}
    for name, call, want in (("gather later", lambda **o: helpers.gather_along_first_dim(mine, world, **o), torch.cat(every)),
                             ("reduce_scatter later", lambda **o: helpers.reduce_scatter_along_first_dim(mine, world, **o), total.chunk(ranks)[rank]),
                             ("allreduce later", lambda **o: helpers.allreduce(mine.clone(), world, **o), total)):
        got, work = call(async_op=True)
        work.wait()
        results[name] = got, want
    whole = torch.randn(256 * ranks, 160, generator=torch.Generator().manual_seed(1))
    for recipe in (Float8CurrentScaling(), Float8BlockScaling()):
        with te.quantized_model_init(recipe=recipe):
            all_rows, rows = te.Linear(160, 256 * ranks, device="cpu").weight, te.Linear(160, 256, device="cpu").weight
        with torch.no_grad():
            all_rows.copy_(whole)
            rows._codes.data.copy_(all_rows._codes.data.chunk(ranks)[rank])
            blocks = rows._codes.rules.scaling != "tensor"
            rows._scale_inv.copy_(all_rows._scale_inv.chunk(ranks)[rank] if blocks else all_rows._scale_inv)
        collectives.reset_counts()
        gathered = helpers.gather_along_first_dim(rows.detach(), world)[0]
        results[f"codes {recipe}"] = gathered.dequantize(), all_rows.detach().dequantize()
        results[f"bytes {recipe}"] = sum(c.bytes for c in collectives.counts().values()), 256 * ranks * 160 + (2 * ranks * 4 * 4 if blocks else 0)
    errors = [catch_error(helpers.reduce_scatter_along_first_dim, torch.zeros(5, 2), world),
              catch_error(helpers.split_tensor_into_1d_equal_chunks, torch.zeros(5), world),
              catch_error(helpers.symmetric_all_reduce, mine, world), catch_error(helpers.gather_along_first_dim, mine, world, quantizer=1)]
    return results, errors


def recomputed():
    """Returns by case: whether a checkpoint that shards its saved input over the ranks gives the gradients of a run without checkpoint, the number
    of all-gathers, and whether the whole input stayed in memory."""
    results = {}
    for name, recipe, shape in (("F32", None, (8, 2, 64)), ("odd", None, (3, 1, 7)), ("delayed", DelayedScaling(), (8, 2, 64)),
                                ("current", Float8CurrentScaling(), (8, 2, 64))):
        torch.manual_seed(3)
        width = shape[-1]
        layer = te.TransformerLayer(width, 64, 4, device="cpu") if width == 64 else te.Linear(width, 5, device="cpu")
        tracker = te.distributed.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 5)

        def run(**options):
            torch.manual_seed(4)
            layer.zero_grad()
            first = torch.randn(shape).requires_grad_()
            x = first * 1
            gone = weakref.ref(x)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = te.checkpoint(layer, x, get_rng_state_tracker=lambda: tracker, **options) if options else layer(x)
            del x
            gc.collect()
            stayed = gone() is not None
            y.square().sum().backward()
            return [first.grad, *(p.grad.clone() for p in layer.parameters())], stayed

        layer.train()
        if recipe is not None:
            run(), layer.reset_fp8_meta_tensors() if hasattr(layer, "reset_fp8_meta_tensors") else None
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in layer.state_dict().items()}
        want, _ = run()
        layer.load_state_dict(state)
        collectives.reset_counts()
        got, stayed = run(distribute_saved_activations=True, tp_group=dist.group.WORLD)
        gathers = {n: c.calls for (n, _), c in collectives.counts().items()}.get("all_gather", 0)
        results[name] = all(map(torch.equal, got, want)), gathers, stayed
    return results


def no_groups():
    """Returns the errors: for each wrong value passed as a process group, and for each function that takes a group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    wrong = {"mesh": mesh, "tensor": distribute_tensor(torch.ones(2), mesh, [Replicate()]),
             "others": [dist.new_group([0]), dist.new_group([1])][1 - dist.get_rank()]}
    layer = te.Linear(16, 16, device="cpu")

    def reduced(group):
        with te.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
            layer(torch.ones(16, 16))

    calls = {"tp_group": lambda group: te.Linear(16, 16, device="cpu", tp_group=group),
             "cp_group": lambda group: te.DotProductAttention(2, 16, cp_group=group),
             "amax_reduction_group": reduced, "process_group": lambda group: te.ops.AllReduce(group),
             "the process group": lambda group: helpers.allreduce(torch.ones(2), group)}
    return {(kind, argument): catch_error(call, group) for kind, group in wrong.items() for argument, call in calls.items()}


def tensors_of_ranks():
    """Returns the errors of layers, functions and ops for DTensor inputs or parameters, with and without gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def everywhere(*shape):
        return distribute_tensor(torch.ones(shape), mesh, [Replicate()])

    x, q, found = everywhere(4, 2, 32), everywhere(4, 2, 4, 8), {}
    owner = te.Linear(32, 32, device="cpu")
    owner.weight = torch.nn.Parameter(everywhere(32, 32))
    calls = {"linear": lambda: te.Linear(32, 32, device="cpu")(x), "norm": lambda: te.RMSNorm(32, device="cpu")(x),
             "layer": lambda: te.TransformerLayer(32, 64, 4, device="cpu")(x), "attention": lambda: te.DotProductAttention(4, 8)(q, q, q),
             "operation": lambda: te.ops.Linear(32, 32, device="cpu")(x), "weight": lambda: owner(torch.ones(4, 32)),
             "function": lambda: te.apply_rotary_pos_emb(q, te.RotaryPositionEmbedding(8)(4).cpu()),
             "op": lambda: ops.gelu(input=x, output=torch.ones(4, 2, 32))}
    for name, call in calls.items():
        for trains in (True, False):
            with torch.set_grad_enabled(trains):
                found[name, trains] = catch_error(call)
    return found


def prepared_for_fsdp():
    """Returns True if a module has its wrapper's group afterwards, the group of another module, and the errors of roots that FullyShardedDataParallel
    does not wrap."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    layer = te.Linear(16, 16, device="cpu")
    model = torch.nn.Sequential(FullyShardedDataParallel(layer, device_id=torch.device("cpu")), torch.nn.Linear(16, 16), te.RMSNorm(16, device="cpu"))
    root = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    helpers.prepare_te_modules_for_fsdp(root)
    groups = [layer.fsdp_group is dist.group.WORLD, te.Linear(16, 16, device="cpu").fsdp_group]
    return groups, [catch_error(helpers.prepare_te_modules_for_fsdp, other) for other in (model, fully_shard(te.Linear(16, 16, device="cpu")), 1)]
