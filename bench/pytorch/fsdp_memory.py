#!/usr/bin/env python3
"""Compares FSDP2 around layers with FP8 weights with the same layers in BF16: bytes gathered per step, and bytes of weights that
stay on a rank between steps. The program counts bytes and times nothing, so any machine gives the same figures.

usage: fsdp_memory.py [--layers 4] [--hidden 1024] [--ranks 2]
"""
import argparse
import os
import subprocess
import sys
import tempfile


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser.parse_args()


def resident(model):
    """Returns the bytes of memory that a rank's parameters hold."""
    import torch
    storages = {}

    def visit(tensor):
        codes = getattr(tensor, "_codes", None)
        if codes is not None:
            for name in {n for kind in type(codes).__mro__ for n in getattr(kind, "__slots__", ())}:
                part = getattr(codes, name)
                if isinstance(part, torch.Tensor):
                    visit(part)
        elif isinstance(tensor, torch.Tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().size()

    for module in model.modules():
        group = getattr(module, "_get_fsdp_state", lambda: None)()
        for p in getattr(getattr(group, "_fsdp_param_group", None), "fsdp_params", ()):
            for tensor in (p.sharded_param._local_tensor, p._sharded_param_data, *p.all_gather_outputs, *p._unsharded_inner_tensors):
                visit(tensor)
    return sum(storages.values())


def measure(o, recipe, reshard):
    """Returns (bytes gathered in the second step, bytes of weights that stay); without a recipe the weights are BF16."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    import te_fl.pytorch as te
    mesh = init_device_mesh("cpu", (o.ranks,))
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        model = torch.nn.Sequential(*[te.TransformerLayer(o.hidden, 4 * o.hidden, 8, fuse_qkv_params=True, hidden_dropout=0, attention_dropout=0,
                                                          params_dtype=torch.bfloat16, device="cpu") for _ in range(o.layers)])
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gathered, gather = [0], dist.all_gather_into_tensor

    def counted(output_tensor, input_tensor, *rest, **named):
        gathered[0] += output_tensor.numel() * output_tensor.itemsize
        return gather(output_tensor, input_tensor, *rest, **named)

    dist.all_gather_into_tensor = counted
    for _ in range(2):
        gathered[0] = 0
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = model(torch.ones(4, 1, o.hidden, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_gather_into_tensor = gather
    return gathered[0], resident(model)


def rank(o):
    import torch.distributed as dist
    from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
    dist.init_process_group("gloo", store=dist.FileStore(o.store, o.ranks), rank=o.rank, world_size=o.ranks)
    for reshard in (True, False):
        base = measure(o, None, reshard)
        rows = [(type(r).__name__, measure(o, r, reshard)) for r in (DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling())]
        if o.rank == 0:
            for name, (gathered, stays) in [("BF16", base), *rows]:
                print(f"{name:22} reshard_after_forward={reshard!s:5}  gathered {gathered / 2**20:8.2f} MiB {gathered / base[0]:.3f}   "
                      f"stays {stays / 2**20:8.2f} MiB {stays / base[1]:.3f}")
    dist.destroy_process_group()


def main():
    o = arguments()
    if o.rank is not None:
        return rank(o)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--layers", str(o.layers), "--hidden", str(o.hidden), "--ranks", str(o.ranks), "--store", f"{folder}/store"]
        ranks = [subprocess.Popen([*command, "--rank", str(r)], env={**os.environ, "OMP_NUM_THREADS": "1"}) for r in range(o.ranks)]
        sys.exit(max(abs(r.wait()) for r in ranks))


if __name__ == "__main__":
    main()
