"""The functions that each rank runs for trouble_test.py."""

import datetime
import gc
import os
import signal
import sys
import time
import weakref
from unittest import mock

import torch
import torch.distributed as dist

import te_fl.pytorch as te
from as_ops_cases import environment
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.pytorch import distributed as helpers
from te_fl.pytorch.functions.cross_entropy import parallel_cross_entropy
from te_fl.pytorch.distributed import collectives


def catch_error(function):
    try:
        function()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def amaxes():
    """Returns by recipe: the collectives of a stack's first and second step, and the scales after them."""
    results = {}
    for name, recipe in (("delayed", DelayedScaling(amax_history_len=2)), ("alone", DelayedScaling(amax_history_len=2, reduce_amax=False)),
                         ("current", Float8CurrentScaling()), ("block", Float8BlockScaling())):
        torch.manual_seed(1)
        stack = torch.nn.Sequential(*[te.TransformerLayer(32, 64, 2, hidden_dropout=0, attention_dropout=0, device="cpu") for _ in range(3)])
        taken = []
        for _ in range(2):
            collectives.reset_counts()
            with te.autocast(recipe=recipe):
                y = stack((1.0 + dist.get_rank()) * torch.randn(8, 2, 32))
            forward = {n: c.calls for (n, _), c in collectives.counts().items()}
            collectives.reset_counts()
            ((1.0 + dist.get_rank()) * y.sum()).backward()
            taken.append((forward, {n: c.calls for (n, _), c in collectives.counts().items()}))
        scales = [t.tolist() for m in stack.modules() if hasattr(m, "_fp8_state") for n, t in m._fp8_state() if n.endswith("scale")]
        results[name] = taken, scales
    return results


def destroyed_group():
    """Returns the errors of calls over a group that was destroyed."""
    group = dist.new_group(list(range(dist.get_world_size())))
    layer = te.Linear(16, 16, device="cpu")
    with te.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
        layer(torch.ones(16, 16)).sum().backward()
    dist.destroy_process_group(group)

    def forward():
        with te.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
            layer(torch.ones(16, 16))

    x = torch.ones(1, 2, 4)
    return [catch_error(forward), catch_error(lambda: helpers.allreduce(torch.ones(2), group)),
            catch_error(lambda: parallel_cross_entropy(x, torch.zeros(1, 2, dtype=torch.int64), dist_process_group=group))]


def groups_that_stay():
    """Returns for each use of a group whether the group object stays alive after destroy_process_group() and after the layers that used it were
    freed; and the error of a backward that runs after the group of its amaxes was freed."""
    group = ()

    def used(kind):
        if kind == "collective":
            collectives.all_reduce(torch.ones(2), group)
            return
        parallel = {} if kind == "amaxes" else {"parallel_mode": "column", "tp_group": group, "sequence_parallel": kind != "tensor parallel"}
        layer = te.Linear(16, 16, device="cpu", **parallel)
        with te.autocast(enabled=kind in ("amaxes", "rows and amaxes"), recipe=DelayedScaling(), amax_reduction_group=group):
            layer(torch.ones(16, 16)).sum().backward()

    stay = {}
    for kind in ("collective", "amaxes", "tensor parallel", "rows", "rows and amaxes"):
        group = dist.new_group(list(range(dist.get_world_size())))
        used(kind)
        seen = weakref.ref(group)
        dist.destroy_process_group(group)
        group = None
        gc.collect()
        stay[kind] = seen() is not None
    group = dist.new_group(list(range(dist.get_world_size())))
    with te.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
        y = te.Linear(16, 16, device="cpu")(torch.ones(16, 16))
    dist.destroy_process_group(group)
    group = None
    gc.collect()
    return stay, catch_error(lambda: y.sum().backward())


def outside():
    """Returns the error of a rank that is not in the group; the other ranks continue."""
    group = dist.new_group([0])
    return catch_error(lambda: helpers.allreduce(torch.ones(2), group))


def processes():
    """Returns the process ids of the ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, os.getpid())
    return found


def killed():
    """Rank 1 is killed. Returns the error of an all_reduce, the error of a layer's backward, which waits for its collective later (both with their
    notes), the seconds that the two took together, and rank 1's process id."""
    tensor, process = torch.ones(4, 3), processes()[1]
    y = te.Linear(4, 6, parallel_mode="column", sequence_parallel=True, tp_group=dist.group.WORLD, device="cpu")(torch.ones(2, 4))
    for _ in range(2):
        collectives.all_reduce(tensor)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    return (noted_error(lambda: collectives.all_reduce(tensor)),
            noted_error(lambda: y.sum().backward()), time.monotonic() - begin, process)


ENDS = (lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: os._exit(3), lambda: sys.exit())


def ended():
    """Each rank from 1 on ends in its own way (listed in ENDS) after a collective with rank 0. Returns rank 0's error of the next collective, with
    notes, and the rank's process."""
    groups, own, found = [dist.new_group([0, 1 + i]) for i in range(len(ENDS))], dist.get_rank(), []
    pids = processes()
    for i, group in enumerate(groups):
        if own in (0, 1 + i):
            collectives.all_reduce(torch.ones(2), group)
    if own > 0:
        ENDS[own - 1]()
    for i, group in enumerate(groups):
        found.append((*noted_error(lambda: collectives.all_reduce(torch.ones(2), group)), pids[1 + i]))
    return found


def raised_by_layers():
    """Returns the types of errors that C++ raises for collectives: an all-gather with other rows, a reduction of other amaxes (TE_FL_VALIDATE), and
    an interrupted one."""
    rank, ranks, delayed = dist.get_rank(), list(range(dist.get_world_size())), DelayedScaling()
    types = []

    def call(rows, sites, group):
        layers = [te.Linear(16, 16, device="cpu") for _ in range(sites)]
        split = te.Linear(16, 16, parallel_mode="column", sequence_parallel=True, tp_group=group, device="cpu")
        with te.autocast(recipe=delayed, amax_reduction_group=group):
            for layer in (*layers, *[split] * (rows > 0)):
                layer(torch.ones(max(rows, 16), 16))

    def note(*how):
        try:
            call(*how)
        except BaseException as error:
            types.append(type(error).__name__)

    with environment(TE_FL_VALIDATE="1"):
        for rows, sites in ((16 + 16 * rank, 0), (0, 1 + rank)):
            note(rows, sites, dist.new_group(ranks))
    with mock.patch.object(collectives, "all_reduce", side_effect=KeyboardInterrupt):
        note(0, 1, dist.group.WORLD)
    return types


def failed_in_layers():
    """Makes torch.distributed fail in each collective of a layer. Returns the errors (class, text) by layer, and the next call's."""
    group, found = dist.group.WORLD, {}
    options = dict(tp_group=group, sequence_parallel=True, device="cpu")
    layers = {
        "all_gather": lambda: te.Linear(16, 16, parallel_mode="column", **options)(torch.ones(4, 16)),
        "reduce_scatter": lambda: te.Linear(16, 16, parallel_mode="row", **options)(torch.ones(4, 8)),
        "all_gather of a norm": lambda: te.LayerNormLinear(16, 16, parallel_mode="column", **options)(torch.ones(4, 16)),
        "all_gather of a layer": lambda: te.TransformerLayer(16, 32, 4, set_parallel_mode=True, fuse_qkv_params=True, **options)(torch.ones(4, 2, 16)),
        "all_reduce of a layer": lambda: te.TransformerLayer(16, 32, 4, set_parallel_mode=True, fuse_qkv_params=True, tp_group=group,
                                                             device="cpu")(torch.ones(4, 2, 16)),
    }

    def fails(*arguments, **keywords):
        raise RuntimeError("the network is gone")
    for name, call in layers.items():
        with mock.patch.object(dist, "all_gather_into_tensor", fails), mock.patch.object(dist, "reduce_scatter_tensor", fails), \
                mock.patch.object(dist, "all_reduce", fails):
            try:
                call()
            except Exception as error:
                found[name] = type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])
    return found


def noted_error(function):
    try:
        function()
    except Exception as error:
        own = error.__cause__ or error
        return f"{type(own).__name__}: {own}", getattr(own, "__notes__", str(own).split("\n")[-1:])  # Python 3.10 has no notes
    return None


def error_in_a_backward():
    """One rank's backward raises. Returns (its error, the error of the other rank's amax reduction, the seconds that rank waited)."""
    group = dist.new_group(list(range(dist.get_world_size())), timeout=datetime.timedelta(seconds=2))
    layer = te.Linear(16, 16, device="cpu")
    x = torch.ones(16, 16, requires_grad=True)
    if dist.get_rank() == 1:
        x.register_hook(lambda grad: 1 / 0)
    with te.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
        y = layer(x)
    begin = time.monotonic()
    error = catch_error(lambda: y.sum().backward())
    return error, time.monotonic() - begin


def forked():
    """Returns the error of a collective in a forked child, which has no connections of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, (catch_error(lambda: helpers.allreduce(torch.ones(2))) or "no error").encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text
