"""Trains a small GPT over several ranks: tensor and sequence parallelism in te_fl.pytorch's layers, data parallelism with PyTorch's DDP.

usage: torchrun --nproc-per-node N parallel_gpt.py [--tp RANKS] [--no-sequence-parallel] [--device DEVICE] [--recipe none|delayed|current|block] [--steps N]
  --tp      number of ranks that share each layer; groups of that many ranks train on parts of the batch (default: 1)
  --device  default: cuda if there is a GPU, else cpu
  --recipe  FP8 recipe; none trains in FP32 on the CPU and in BF16 on a GPU (default: none)
The initial weights and the text do not depend on N and --tp, so the losses equal those of one rank.
"""

import argparse
import codecs
import contextlib
import io
import os
import time

import torch
import torch.distributed as dist

import te_fl
import te_fl.pytorch as te
from te_fl.common import recipe
from te_fl.pytorch.distributed import collectives

RECIPES = {"none": None, "delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling, "block": recipe.Float8BlockScaling}
LAYERS, HIDDEN, HEADS, LENGTH, BATCH = 2, 64, 4, 64, 16


class Gpt(torch.nn.Module):
    """A decoder over bytes, [length, batch]. With sequence_parallel, a rank computes layers and logits for its part of the sequence only."""

    def __init__(self, dtype, device, tp_group=None, sequence_parallel=False):
        super().__init__()
        self.tokens = torch.nn.Embedding(256, HIDDEN, device=device, dtype=dtype)
        self.places = torch.nn.Embedding(LENGTH, HIDDEN, device=device, dtype=dtype)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(HIDDEN, 4 * HIDDEN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype, device=device, layer_number=i + 1,
                                fuse_qkv_params=True, set_parallel_mode=True, tp_group=tp_group, sequence_parallel=sequence_parallel)
            for i in range(LAYERS))
        self.head = te.LayerNormLinear(HIDDEN, 256, bias=False, params_dtype=dtype, device=device)
        self.group = tp_group if sequence_parallel and collectives.size_of(tp_group) > 1 else None
        if self.group is not None:
            for module in (self.tokens, self.places, self.head):
                for p in module.parameters():
                    p.sequence_parallel = True  # this rank's gradient covers its own rows only, so it must be summed

    def own(self, t):
        return t if self.group is None else t.chunk(self.group.size())[self.group.rank()]

    def forward(self, text):
        x = self.own(self.tokens(text) + self.places.weight[:, None])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def take_part(whole, part, group):
    """Copies this rank's shard of the whole model's weights into `part`."""
    with torch.no_grad():
        for p, q in zip(whole.parameters(), part.parameters()):
            q.copy_(p if p.shape == q.shape else p.chunk(group.size(), q.partition_dim)[group.rank()])


def groups(tp):
    """Returns this rank's tensor-parallel group, which consists of consecutive ranks, and its data-parallel group."""
    rank, world, own = dist.get_rank(), dist.get_world_size(), [None, None]
    if world % tp:
        raise SystemExit(f"--tp is {tp}, which does not divide the {world} ranks that torchrun started")
    for first in range(0, world, tp):
        group = dist.new_group(list(range(first, first + tp)))
        own[0] = group if first <= rank < first + tp else own[0]
    for place in range(tp):
        group = dist.new_group(list(range(place, world, tp)))
        own[1] = group if rank % tp == place else own[1]
    return own


def add_up(group, bucket):
    """DDP communication hook: all-reduces a gradient bucket with te-fl's collectives, which count it, overlapped with the backward."""
    work = collectives.all_reduce(bucket.buffer(), group, wait=False)
    return work.get_future().then(lambda future: future.value()[0])


def default_text():
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return (codecs.decode(this.s, "rot13") * 4).encode()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--no-sequence-parallel", dest="sp", action="store_false")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipe", default="none", choices=RECIPES)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"])) if options.device == "cuda" else torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options, device)
    dist.destroy_process_group()


def train(options, device):
    tp_group, dp_group = groups(options.tp)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(1)
    whole = Gpt(dtype, device)
    model = Gpt(dtype, device, tp_group, options.sp)
    take_part(whole, model, tp_group)
    del whole
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=dp_group)
    wrapped.register_comm_hook(dp_group, add_up)
    summed = [p for p in model.parameters() if getattr(p, "sequence_parallel", False)]
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-3)
    text = torch.frombuffer(bytearray(default_text()), dtype=torch.uint8).long().to(device)
    fp8 = RECIPES[options.recipe]
    generator, parts = torch.Generator().manual_seed(2), dp_group.size() * (options.tp if model.group else 1)
    te_fl.reset_usage()
    collectives.reset_counts()
    began, losses = time.time(), []
    for step in range(options.steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator).chunk(dp_group.size())[dp_group.rank()].to(device)
        window = text[starts + torch.arange(LENGTH + 1, device=device)[:, None]]
        with te.autocast(enabled=fp8 is not None, recipe=fp8() if fp8 else None):
            logits = wrapped(window[:-1])
        loss = te.parallel_cross_entropy(logits.float(), model.own(window[1:]).contiguous()).mean() / parts  # this rank's share of the loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for p in summed if model.group else ():
            collectives.all_reduce(p.grad, tp_group)
        optimizer.step()
        losses.append(loss.detach())
        if step % 25 == 0 or step + 1 == options.steps:
            mean = torch.stack(losses[-25:]).mean() * parts
            collectives.all_reduce(mean, None, op="avg")
            if dist.get_rank() == 0:
                print(f"step {step + 1:4d}  loss {mean.item():.4f} nats a byte", flush=True)
    if dist.get_rank() == 0:
        kind = f"tp {options.tp}{' with sequence parallel' if model.group else ''}, dp {dp_group.size()}"
        print(f"{options.steps} steps on {device.type}, {kind}, {options.recipe} scaling, in {time.time() - began:.1f} s; ops run by "
              + ", ".join(sorted({row['impl_id'] for row in te_fl.usage()})) + "\ncollectives of rank 0:\n" + collectives.summary(), flush=True)


if __name__ == "__main__":
    main()
