#!/usr/bin/env python3
"""Times layers sharded over several GPUs of one host against one GPU, and against Transformer Engine's package and PyTorch's own parallelism, in one
run.

usage: torchrun --nproc-per-node N bench/gpu/ranks.py [--only PART ...] [--recipes R ...] [--seconds S] [--ctas N ...] [--overlap] [--copies] [--graph] [--profile] [--no-peers] [--json FILE]
  --only     layer: one quickstart layer, tensor and sequence parallel over all ranks; data: four of them, data parallel by DDP, and by megatron-core's
             DistributedDataParallel where it is installed, whose gradients the products write into its buckets; fsdp: the same four, FSDP2 with weights that are FP8 codes (default: all)
  --recipes  BF16, delayed, current and block, or some of them
  --seconds  of each case, in alternating blocks (default 3)
  --ctas     adds groups whose collectives use at most N thread blocks (NCCL's max_ctas), for data and fsdp
  --overlap  adds runs of layer with TE_FL_TP_OVERLAP=1, which overlaps transfers with products
  --copies   adds a group whose all-gathers use copy engines, for fsdp (NCCL's zero-CTA policy, buffers allocated by NCCL)
  --graph    replays CUDA graphs of the layer, so that the host's time does not count; part layer only, without PyTorch's own parallelism
  --profile  prints what the first rank's te-fl steps spend on the host and on the GPU, most expensive first, and measures nothing
  --no-peers measures te-fl only

The layer is the quickstart's (hidden 4096, ffn 16384, 32 heads, 2048 x 4 tokens; BF16 weights and gradients), forward and backward, no optimizer.
Efficiency is the time of the undivided layer, which all GPUs compute at the same time, over N times that of the divided layer; for data, where each
rank has the whole batch, it is the time without the gradient exchange over the time with it. Each figure is the slowest rank's. Peers:
transformer_engine.pytorch, where it is installed, with the same arguments; PyTorch's DTensor (parallelize_module) and, under torch.compile, its
asynchronous tensor parallelism, in BF16. TE_FL_PLUGIN_MODULES names the CUDA plugin of a build; NCCL's NVLink multicast is left off.
"""

import argparse
import gc
import importlib.util
import json
import os
import statistics
import time
from unittest import mock

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measure import machine  # noqa: E402

import te_fl.pytorch as ours  # noqa: E402
from te_fl.common import recipe as our_recipes  # noqa: E402

HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 4096, 16384, 32, 2048, 4
BF16 = torch.bfloat16
LAYER = {2: 0.90, 4: 0.78}  # targets under the delayed recipe
COPIES = ", copy engines"
OVERLAPPED = "te-fl, overlapped"
HOST = {}
RECIPES = ("BF16", "delayed", "current", "block")


def make_recipe(module, name):
    return {"BF16": None, "delayed": module.DelayedScaling, "current": module.Float8CurrentScaling, "block": module.Float8BlockScaling}[name]


def say(*words, sep=" "):
    if dist.get_rank() == 0:
        print(*words, sep=sep, flush=True)


def measured(steps, seconds, block=0.2):
    """Returns {name: [ms per step, one per block]} of alternating blocks; each figure is the slowest rank's. HOST[name] becomes this rank's host ms
    of a step that starts with an empty GPU queue; later steps are not counted, since a full queue blocks the host until the GPU catches up."""
    def run(name, n):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        begin.record()
        began = time.perf_counter()
        steps[name]()
        host[name].append((time.perf_counter() - began) * 1e3)
        for _ in range(n - 1):
            steps[name]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / n

    def slowest(values):
        t = torch.tensor(values, device="cuda")
        dist.all_reduce(t, dist.ReduceOp.MAX)
        return t.tolist()
    counts, host = {}, {name: [] for name in steps}
    for name in steps:
        run(name, 5)
        counts[name] = max(1, int(block * 1e3 / slowest([run(name, 3)])[0]))
    times = {name: [] for name in steps}
    for _ in range(max(3, round(seconds / block))):
        for name in steps:
            times[name].append(run(name, counts[name]))
    HOST.update((name, statistics.median(ms)) for name, ms in host.items())
    return {name: slowest(t) for name, t in times.items()}


def make_step(te, module, recipe, x, dy, group):
    x = x.detach().clone().requires_grad_()
    parameters = list(module.parameters())

    def step():
        for p in parameters:
            p.grad = None
        x.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe() if recipe else None, amax_reduction_group=group):
            y = module(x)
        y.backward(dy)
    return step


def replayed(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()

    def replay(kept=step):  # the default argument keeps the step alive: the graph uses the step's memory
        graph.replay()
    return replay


def layer(te, group=None, **more):
    divided = dict(tp_group=group, tp_size=group.size(), set_parallel_mode=True, sequence_parallel=True) if group else {}
    return te.TransformerLayer(HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, device="cuda", self_attn_mask_type="no_mask",
                               fuse_qkv_params=True, **divided, **more)


class PlainLayer(torch.nn.Module):
    """The layer as PyTorch users write it, split into the submodules that parallelize_module shards."""

    def __init__(self):
        super().__init__()
        with torch.device("cuda"):
            self.norm1, self.norm2 = torch.nn.LayerNorm(HIDDEN, dtype=BF16), torch.nn.LayerNorm(HIDDEN, dtype=BF16)
            self.q, self.k, self.v, self.proj = (torch.nn.Linear(HIDDEN, HIDDEN, dtype=BF16) for _ in range(4))
            self.fc1, self.fc2 = torch.nn.Linear(HIDDEN, FFN, dtype=BF16), torch.nn.Linear(FFN, HIDDEN, dtype=BF16)

    def attention(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, HIDDEN // HEADS)).permute(1, 2, 0, 3) for f in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.permute(2, 0, 1, 3).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


def dtensor_steps(x, dy, names):
    """Returns {name: step} of PyTorch's own tensor parallelism, for those of `names` that run here."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    steps = {}
    for name in names:
        try:
            module = PlainLayer()
            column, row = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
            parallelize_module(module, mesh, {"norm1": SequenceParallel(sequence_dim=0), "norm2": SequenceParallel(sequence_dim=0), "q": column, "k": column, "v": column,
                                              "proj": row, "fc1": column, "fc2": row})
            call = module
            if name != "DTensor":
                torch._inductor.config._micro_pipeline_tp = name == "async TP"
                if name == "async TP":
                    from torch.distributed._symmetric_memory import enable_symm_mem_for_group
                    enable_symm_mem_for_group(mesh.get_group().group_name)
                call = torch.compile(module, fullgraph=True)
            local, parameters = x.detach().clone().requires_grad_(), list(module.parameters())
            grad = DTensor.from_local(dy, mesh, [Shard(0)])

            def step(call=call, local=local, parameters=parameters, grad=grad):
                for p in parameters:
                    p.grad = None
                local.grad = None
                call(DTensor.from_local(local, mesh, [Shard(0)])).backward(grad)
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            steps[name] = step
        except Exception as error:
            say(f"    {name} does not run: {(str(error).splitlines() or [type(error).__name__])[0][:200]}")
    return steps


def theirs():
    """Returns (transformer_engine.pytorch, {recipe name: recipe}), or None if it is not installed."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    import transformer_engine.common.recipe as recipes
    import transformer_engine.pytorch as package
    return package, recipes


def clean():
    gc.collect()
    torch.cuda.empty_cache()


def profile(steps):
    for name, step in steps.items():
        if not name.startswith("te-fl"):
            continue
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(5):
                step()
            torch.cuda.synchronize()
        for by in ("self_cpu_time_total", "self_cuda_time_total"):
            say(name, found.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=80), sep="\n")


def compare(options, rows, part, recipe, steps, base, divide, target):
    if options.profile:
        return profile(steps)
    return report(rows, part, recipe, measured(steps, options.seconds), base, divide, target)


def report(rows, part, recipe, times, base, divide, target=None):
    for name, ms in times.items():
        if name == base:
            continue
        efficiency = statistics.median(one / (divide * many) for one, many in zip(times[base], ms))
        row = dict(part=part, recipe=recipe, name=name, ranks=dist.get_world_size(), ms=statistics.median(ms), one_ms=statistics.median(times[base]), efficiency=efficiency,
                   host_ms=HOST[name])
        if name in ("te-fl", OVERLAPPED) and target:
            row["target"] = target
        rows.append(row)
        say(f"{part:6} {recipe:8} {name:20} {row['ms']:8.3f} ms, one GPU {row['one_ms']:8.3f} ms, efficiency {efficiency:.3f}, host {HOST[name]:.2f} ms" + (f" (target {target})" if "target" in row else ""))


def part_layer(options, rows):
    n, world = dist.get_world_size(), dist.group.WORLD
    whole_x = torch.randn(SEQUENCE, BATCH, HIDDEN, device="cuda", dtype=BF16)
    x, whole_dy = torch.randn(SEQUENCE // n, BATCH, HIDDEN, device="cuda", dtype=BF16), torch.randn_like(whole_x) * 0.1
    dy = torch.randn_like(x) * 0.1
    peer = None if options.no_peers else theirs()
    for name in options.recipes:
        recipe = make_recipe(our_recipes, name)
        steps = {"whole": make_step(ours, layer(ours), recipe, whole_x, whole_dy, world), "te-fl": make_step(ours, layer(ours, world), recipe, x, dy, world)}
        if options.overlap:
            with mock.patch.dict(os.environ, {"TE_FL_TP_OVERLAP": "1"}):  # the variable is read at a process group's first use
                steps[OVERLAPPED] = make_step(ours, layer(ours, world), recipe, x, dy, world)
                for _ in range(2):
                    steps[OVERLAPPED]()
        if peer:
            used = make_recipe(peer[1], name)
            for label, make, one_x, one_dy in (("Transformer Engine", lambda: layer(peer[0], world), x, dy),):
                try:
                    steps[label] = make_step(peer[0], make(), used, one_x, one_dy, world)
                    for _ in range(2):
                        steps[label]()
                except Exception as error:
                    steps.pop(label, None)
                    say(f"    {label} does not run {name}: {(str(error).splitlines() or ['?'])[0][:200]}")
        if options.graph:
            for label in list(steps):
                try:
                    steps[label] = replayed(steps[label])
                except Exception as error:
                    del steps[label]
                    say(f"    no graph of {label}, {name}: {(str(error).splitlines() or ['?'])[0][:200]}")
        elif name == "BF16" and not options.no_peers:
            steps.update(dtensor_steps(x, dy, ("DTensor", "compiled DTensor", "async TP")))
        if options.profile:
            profile(steps)
            continue
        times = measured(steps, options.seconds)
        report(rows, "layer", name, times, "whole", n, LAYER.get(n) if name == "delayed" else None)
        for label, ms in times.items():
            for own in ("te-fl", OVERLAPPED) if OVERLAPPED in times else ("te-fl",):
                if label not in ("whole", "te-fl", OVERLAPPED):
                    say(f"       {own} takes {statistics.median(a / b for a, b in zip(times[own], ms)):.3f} of {label}'s time")
        del steps
        clean()


def make_groups(options, copies=False):
    """Returns {label: group} of all ranks: PyTorch's default group, and groups whose collectives occupy less of the chip."""
    groups = {"": dist.group.WORLD}
    for most in options.ctas:
        how = dist.ProcessGroupNCCL.Options()
        how.config.max_ctas = most
        groups[f", {most} CTAs"] = dist.new_group(pg_options=how)
    if copies and options.copies:
        how = dist.ProcessGroupNCCL.Options()
        how.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        groups[COPIES] = dist.new_group(pg_options=how)
    return groups


def megatron_step(model, recipe, x, dy, group):
    """Returns a step of the four layers under megatron-core's DistributedDataParallel, or None if it is not installed."""
    if importlib.util.find_spec("megatron") is None:
        return None
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=4, hidden_size=HIDDEN, num_attention_heads=HEADS, gradient_accumulation_fusion=True)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=False), model)
    x = x.detach().clone().requires_grad_()

    def step():
        wrapped.zero_grad_buffer()
        x.grad, y = None, x
        with ours.autocast(enabled=recipe is not None, recipe=recipe() if recipe else None, amax_reduction_group=group):
            for one in model:
                y = one(y, is_first_microbatch=True)
        y.backward(dy)
        wrapped.finish_grad_sync()
    return step


def part_data(options, rows, layers=4):
    from torch.nn.parallel import DistributedDataParallel
    world = dist.group.WORLD
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, device="cuda", dtype=BF16)
    dy = torch.randn_like(x) * 0.1
    for name in options.recipes:
        recipe = make_recipe(our_recipes, name)
        steps = {"alone": make_step(ours, torch.nn.Sequential(*[layer(ours) for _ in range(layers)]), recipe, x, dy, world)}
        for label, group in make_groups(options).items():
            model = DistributedDataParallel(torch.nn.Sequential(*[layer(ours) for _ in range(layers)]), process_group=group, gradient_as_bucket_view=True)
            steps["te-fl" + label] = make_step(ours, model, recipe, x, dy, world)
        try:
            step = megatron_step(torch.nn.Sequential(*[layer(ours, fuse_wgrad_accumulation=True) for _ in range(layers)]), recipe, x, dy, world)
            if step:
                step()
                steps["te-fl, Megatron's DDP"] = step
        except Exception as error:
            say(f"    megatron-core's does not run: {(str(error).splitlines() or ['?'])[0][:200]}")
        compare(options, rows, "data", name, steps, "alone", 1, 0.97 if name == "delayed" else None)
        del steps, model
        clean()


def part_fsdp(options, rows, layers=4):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    world = dist.group.WORLD
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, device="cuda", dtype=BF16)
    dy = torch.randn_like(x) * 0.1
    for name in options.recipes:
        recipe = make_recipe(our_recipes, name)
        steps = {}
        cases = [("alone", None, False), *[(f"te-fl{label}", group, True) for label, group in make_groups(options, copies=True).items()], ("te-fl, not resharded", world, False)]
        for label, group, reshard in cases:
            with ours.quantized_model_init(enabled=recipe is not None, recipe=recipe() if recipe else None):
                model = torch.nn.Sequential(*[layer(ours) for _ in range(layers)])
            if group:
                mesh = DeviceMesh.from_group(group, "cuda")
                for one in model:
                    fully_shard(one, mesh=mesh, reshard_after_forward=reshard)
                fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
                if label.endswith(COPIES):
                    for one in (*model, model):
                        one.set_allocate_memory_from_process_group_for_comm(True)
            step = make_step(ours, model, recipe, x, dy, world)
            try:
                step()
                steps[label] = step
            except Exception as error:
                say(f"    {label} does not run: {(str(error).splitlines() or ['?'])[0][:200]}")
        compare(options, rows, "fsdp", name, steps, "alone", 1, 0.95 if name == "delayed" else None)
        del steps, model
        clean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("layer", "data", "fsdp"), default=("layer", "data", "fsdp"))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--ctas", type=int, nargs="+", default=[])
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(1, "ranks.py: start it by torchrun --nproc-per-node N, one process for each GPU\n")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.manual_seed(1 + dist.get_rank())
    say(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    rows = []
    for part, run in (("layer", part_layer), ("data", part_data), ("fsdp", part_fsdp)):
        if part in options.only:
            run(options, rows)
    if options.json and dist.get_rank() == 0:
        text = json.dumps({"machine": machine(), "ranks": dist.get_world_size(), "rows": rows}, indent=1)
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
