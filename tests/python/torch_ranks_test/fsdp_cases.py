"""The functions that each rank runs for fsdp_test.py."""

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.errors import Unsupported
from te_fl.pytorch.fp8.float8_tensor import Float8Tensor

DELAYED, CURRENT, BLOCK = DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8BlockScaling()
RECIPES = {"none": None, "delayed": DELAYED, "current": CURRENT, "block": BLOCK}
HIDDEN, FFN = 256, 512


def layers(codes, recipe, count=1, seed=7, dtype=None):
    torch.manual_seed(seed)
    with te.quantized_model_init(codes, recipe):
        return torch.nn.Sequential(*[te.TransformerLayer(HIDDEN, FFN, 4, hidden_dropout=0, attention_dropout=0, fuse_qkv_params=True,
                                                         params_dtype=dtype, device="cpu") for _ in range(count)])


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model, **options):
    for layer in model:
        fully_shard(layer, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def data(seed=1, batch=4):
    torch.manual_seed(seed)
    return torch.randn(8, batch, HIDDEN), torch.randn(8, batch, HIDDEN)


def of_rank(whole):
    each = whole.shape[1] // dist.get_world_size()
    return whole[:, dist.get_rank() * each:(dist.get_rank() + 1) * each]


def everything(whole):
    return whole


def local(p):
    return p._local_tensor if isinstance(p, DTensor) else p


def compute_loss(model, recipe, mine, seed=1):
    x, y = map(mine, data(seed))
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return (model(x) - y).square().mean()


def mean(loss, mine):
    loss = loss.detach().clone()
    if mine is of_rank:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def once(model, recipe, mine):
    """Runs one step; returns the loss, and the gradients gathered from all ranks by name."""
    loss = compute_loss(model, recipe, mine)
    loss.backward()
    return mean(loss, mine), {n: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad) for n, p in model.named_parameters()}


def gradients():
    """Returns (loss, gradients) without and with sharding, in F32, with and without FP8 weights."""
    results = {}
    for codes, recipe in ((False, None), (True, CURRENT), (True, BLOCK)):
        want = once(layers(codes, recipe), None, everything)
        for reshard in (True, False):
            results[codes, str(recipe), reshard] = (once(sharded(layers(codes, recipe), reshard_after_forward=reshard), None, of_rank), want)
    return results


def train(model, recipe, mine, steps, optimizer=None):
    optimizer = optimizer or te.optimizers.FusedAdam(model.parameters(), lr=3e-4, master_weights=True)
    losses = []
    for step in range(steps):
        loss = compute_loss(model, recipe, mine, seed=step % 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss, mine))
    return losses


def scales(model):
    """Returns the bytes of all scales that must be equal on all ranks: those of FP8 weights, and of delayed scaling."""
    found = []
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if isinstance(local(p), Float8Tensor) and local(p)._codes.rules.scaling == "tensor":
                found += [local(p)._codes.scale_inv.item(), local(p)._codes.amax.item()]
        if hasattr(module, "_fp8_state"):
            found += [v for n, t in module._fp8_state() if n.endswith("scale") for v in t.tolist()]
    return found


def losses():
    """Returns {recipe and kind of weights: (losses of 50 steps without sharding, with sharding, scales after them)}."""
    results = {}
    for name, codes in (("delayed", True), ("current", True), ("block", True), ("delayed", False)):
        recipe = RECIPES[name]
        model = sharded(layers(codes, recipe))
        results[name, codes] = train(layers(codes, recipe), recipe, everything, 50), train(model, recipe, of_rank, 50), scales(model)
    return results


def codes_of_all(p):
    """Returns the bytes of an FP8 weight's codes and scales, gathered from the shards of all ranks."""
    held = local(p)
    codes = held._codes
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (codes.data.view(torch.uint8).clone(), codes.scale_inv.clone()))
    blocks = codes.rules.scaling != "tensor"
    return torch.cat([data for data, _ in parts]), torch.cat([scale for _, scale in parts]) if blocks else parts[0][1]


def steps():
    """Returns by optimizer and recipe whether the codes after a sharded step equal those after an unsharded step."""
    results = {}
    optimizers = {"adam": lambda p: te.optimizers.FusedAdam(p, lr=1e-2, master_weights=True), "adam without masters":
                  lambda p: te.optimizers.FusedAdam(p, lr=1e-2), "sgd": lambda p: te.optimizers.FusedSGD(p, lr=0.1, momentum=0.9),
                  "torch": lambda p: torch.optim.AdamW(p, lr=1e-2), "torch foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True)}
    for name, make in optimizers.items():
        for recipe in (CURRENT, DelayedScaling(margin=1), BLOCK, Float8CurrentScaling(use_power_2_scales=True)):
            torch.manual_seed(3)
            with te.quantized_model_init(recipe=recipe):
                whole, part = (te.Linear(128, 256, device="cpu") for _ in range(2))
            part.load_state_dict(whole.state_dict())
            fully_shard(part, mesh=mesh())
            part(torch.zeros(2, 128))  # makes FSDP gather once
            part.reshard()
            both = make(whole.parameters()), make(part.parameters())
            for seed in range(2):
                for p, q in zip(whole.parameters(), part.parameters()):
                    torch.manual_seed(seed)
                    p.grad = torch.randn(p.shape)
                    q.grad = DTensor.from_local(p.grad.chunk(dist.get_world_size())[dist.get_rank()].contiguous(), mesh(), q.placements)
                for optimizer in both:
                    optimizer.step()
            codes, scale = codes_of_all(part.weight)
            own = whole.weight._codes
            results[name, str(recipe)] = (torch.equal(codes, own.data.view(torch.uint8)), torch.equal(scale, own.scale_inv),
                                          torch.equal(part.bias.full_tensor(), whole.bias))
    return results


def memory():
    """Returns the bytes that stay between steps, and the tensors of unsharded weights that hold memory, after a forward and after a step."""
    model = sharded(layers(True, CURRENT, dtype=torch.bfloat16).bfloat16())
    loss = compute_loss(model, CURRENT, lambda w: of_rank(w).bfloat16())
    group = model[0]._get_fsdp_state()._fsdp_param_group
    held = [[], []]

    def note(into):
        for p in group.fsdp_params:
            into += [t.untyped_storage().size() for t in (*p.all_gather_outputs, *p._unsharded_inner_tensors)]

    note(held[0])
    inner = sum(len(p._unsharded_inner_tensors) for p in group.fsdp_params)
    loss.backward()
    note(held[1])
    resident = 0
    for p in group.fsdp_params:
        kept = local(p.sharded_param)
        whole = getattr(kept._codes, "whole", kept._codes) if isinstance(kept, Float8Tensor) else None
        parts = [kept, p._sharded_param_data] if whole is None else [whole.data, whole.scale_inv, whole.amax, whole.columns, whole.unrounded]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().size() for t in parts if t is not None}
        resident += sum(storages.values())
    return held, inner, resident, sum(p.numel() for p in model.parameters()) * 2 // dist.get_world_size()


def uneven():
    """Tests rows that do not divide by the ranks, and fewer rows than ranks: whether outputs, gradients and codes equal the unsharded ones."""
    results = []
    for rows in (5, 1):
        torch.manual_seed(3)
        with te.quantized_model_init(recipe=CURRENT):
            whole, part = (te.Linear(48, rows, device="cpu") for _ in range(2))
        part.load_state_dict(whole.state_dict())
        fully_shard(part, mesh=mesh())
        optimizers = [te.optimizers.FusedAdam(m.parameters(), lr=1e-2, master_weights=True) for m in (whole, part)]
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(4, 48)
            outputs = [m(x) for m in (whole, part)]
            for y, optimizer in zip(outputs, optimizers):
                y.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(torch.equal(*outputs))
        results.append(torch.equal(codes_of_all(part.weight)[0], whole.weight._data))
    return results


def own_weights():
    """If ranks draw different weights, the gathered weight has each rank's rows and is equal on all ranks."""
    torch.manual_seed(dist.get_rank())
    with te.quantized_model_init(recipe=CURRENT):
        module = te.Linear(64, 32, bias=False, device="cpu")
    with torch.no_grad():
        module.weight.mul_(1 + dist.get_rank())
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, module.weight.detach().dequantize().chunk(dist.get_world_size())[dist.get_rank()])
    want = torch.cat(rows)
    fully_shard(module, mesh=mesh())
    return module(torch.eye(64)).t().detach(), want, local(module.weight)._codes.scale_inv.item()


def loaded_before_the_first_forward():
    """High-precision values that are loaded into shards are rounded once, with a scale from all ranks' values."""
    with te.quantized_model_init(recipe=CURRENT):
        whole, part = (te.Linear(64, 33, device="cpu") for _ in range(2))
    fully_shard(part, mesh=mesh())
    torch.manual_seed(5)
    values = torch.randn(33, 64) * torch.arange(1, 34)[:, None]
    with torch.no_grad():
        whole.weight.copy_(values)
        part.weight.copy_(torch.distributed.tensor.distribute_tensor(values, mesh(), part.weight.placements))
    part(torch.zeros(1, 64))
    part.reshard()
    codes, scale = codes_of_all(part.weight)
    return torch.equal(codes, whole.weight._data), torch.equal(scale, whole.weight._scale_inv)


def divided_blocks():
    """Shards a weight whose scaling blocks cross the ranks' rows. Returns (warnings, class of the local weight, output sharded, output unsharded)."""
    torch.manual_seed(3)
    with te.quantized_model_init(recipe=BLOCK):
        whole, part = (te.Linear(128, 144, device="cpu") for _ in range(2))
    part.load_state_dict(whole.state_dict())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fully_shard(part, mesh=mesh())
    torch.manual_seed(1)
    x = torch.randn(4, 128)
    return [str(w.message) for w in seen if "fully_shard" in str(w.message)], type(local(part.weight)).__name__, part(x).detach(), whole(x).detach()


def folder():
    """Makes a new folder on one rank; returns its name on all ranks."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return names[0]


def checkpoints():
    """Returns by recipe whether codes saved at two ranks are equal when loaded at two ranks and at one, whether codes saved at one rank are equal
    when loaded at two, and whether the following steps are equal."""
    results = {}
    for name in ("delayed", "current", "block"):
        recipe = RECIPES[name]
        model = sharded(layers(True, recipe))
        train(model, recipe, of_rank, 2)
        place = folder()
        dcp.save({"model": model.state_dict()}, checkpoint_id=place)

        def loaded(target, place):
            compute_loss(target, recipe, of_rank).backward()
            state = {"model": target.state_dict()}
            dcp.load(state, checkpoint_id=place)
            target.load_state_dict(state["model"])
            target.zero_grad()
            return target

        two, one = loaded(sharded(layers(True, recipe, seed=8)), place), loaded(layers(True, recipe, seed=9), place)
        other = folder()
        dcp.save({"model": one.state_dict()}, checkpoint_id=other)
        back = loaded(sharded(layers(True, recipe, seed=10)), other)
        want = {n: codes_of_all(p) for n, p in model.named_parameters() if isinstance(local(p), Float8Tensor)}

        def same(target):
            return all(all(map(torch.equal, codes_of_all(p), want[n])) for n, p in target.named_parameters() if n in want)

        single = all(torch.equal(p._data, want[n][0]) for n, p in one.named_parameters() if n in want)
        results[name] = len(want), same(two), single, same(back), train(two, recipe, of_rank, 2) == train(model, recipe, of_rank, 2)
    return results


def late_values():
    """Returns the error, on each rank, of loading high-precision values after the first forward."""
    plain = sharded(layers(False, CURRENT))
    place = folder()
    dcp.save({"model": plain.state_dict()}, checkpoint_id=place)
    model = sharded(layers(True, CURRENT))
    early = {"model": model.state_dict()}
    dcp.load(early, checkpoint_id=place)
    compute_loss(model, CURRENT, of_rank)
    try:
        dcp.load({"model": model.state_dict()}, checkpoint_id=place)
    except BaseException as error:
        return str(error)


def made_without_memory():
    """Shards modules of the meta device, which get their values afterwards; returns (kinds of weights, whether values are rounded once, losses)."""
    results = []
    for recipe, width in ((CURRENT, 66), (BLOCK, 256)):
        with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            model = te.LayerNormMLP(width, 256, device="meta")
        fully_shard(model, mesh=mesh())
        model.to_empty(device="cpu")
        torch.manual_seed(1 + dist.get_rank())
        model.reset_parameters()
        weights = [p for p in model.parameters() if p.dim() == 2]
        kinds = [type(local(p)).__name__ for p in weights]
        before = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(before, weights[0].get_high_precision_init_val())
        losses = []
        for _ in range(4):
            with te.autocast(recipe=recipe):
                loss = (model(torch.ones(16, width)) - 1).square().mean()
            loss.backward()
            if not losses:
                whole = Float8Tensor.quantised(torch.cat(before), local(weights[0])._codes.rules)
                same = torch.equal(codes_of_all(model.fc1_weight)[0], whole._data)
                optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((kinds, same, losses))
    return results
