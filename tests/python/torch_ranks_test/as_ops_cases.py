"""The functions that each rank runs for as_ops_test.py."""

import contextlib
import datetime
import gc
import json
import os
import time
import sys
import weakref

import torch
import torch.distributed as dist

import te_fl
from helpers_cases import catch_error
from te_fl.pytorch.distributed import collectives, communicator

CPU = torch.device("cpu")


def values(rank):
    return torch.arange(6.0).view(3, 2) + 10 * (rank + 1)


def exchanged():
    """Returns {collective and form of the call: (received values, expected values)}."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = [values(r) for r in range(ranks)]
    total, largest = sum(every), torch.stack(every).amax(0)
    results = {}
    for op, want in (("sum", total), ("max", largest), ("avg", total / ranks)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16) + ((torch.int32,) if op != "avg" else ()):
            x = values(rank).to(dtype)
            collectives.all_reduce(x, None, op)
            results[f"all_reduce {op} {dtype}"] = x.double(), want.to(dtype).double()
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint8):
        part = values(rank).to(dtype)
        whole = torch.empty(3 * ranks, 2, dtype=dtype)
        collectives.all_gather_into(whole, part)
        results[f"all_gather {dtype}"] = whole.float(), torch.cat([v.to(dtype) for v in every]).float()
        data = part.clone()
        collectives.broadcast(data, ranks - 1)
        results[f"broadcast {dtype}"] = data.float(), every[-1].to(dtype).float()
    whole, part = torch.cat([values(rank)] * ranks), torch.empty(3, 2)
    whole[:3] += 1
    collectives.reduce_scatter_into(part, whole)
    results["reduce_scatter"] = part, total + (ranks if rank == 0 else 0)
    swapped = torch.empty(2 * ranks)
    collectives.all_to_all(swapped, torch.arange(2.0 * ranks) + 100 * rank)
    results["all_to_all"] = swapped, torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(ranks)])
    results["all_to_all_v"] = uneven(rank, ranks)
    token = torch.full((3,), float(rank))
    if rank == 0:
        collectives.send(values(0), 1)
        work = collectives.receive(token, 1, wait=False)
    else:
        collectives.receive(other := torch.empty(3, 2), 0)
        work = collectives.send(token, 0, wait=False)
        results["receive"] = other, values(0)
    work.wait()
    results["receive later"] = token, torch.ones(3)
    later = {name: values(rank) for name in ("all_reduce", "broadcast")}
    works = [collectives.all_reduce(later["all_reduce"], wait=False), collectives.broadcast(later["broadcast"], 0, wait=False)]
    for work in works:
        work.wait()
    results["all_reduce later"], results["broadcast later"] = (later["all_reduce"], total), (later["broadcast"], every[0])
    return results


def uneven(rank, ranks):
    """Rank r sends r + t + 1 rows to rank t, each filled with 10 r + t."""
    mine = torch.cat([torch.full((rank + t + 1, 2), 10.0 * rank + t) for t in range(ranks)])
    want = torch.cat([torch.full((r + rank + 1, 2), 10.0 * r + rank) for r in range(ranks)])
    got = torch.empty_like(want)
    collectives.all_to_all(got, mine, None, [r + rank + 1 for r in range(ranks)], [rank + t + 1 for t in range(ranks)])
    return got, want


def called_as_ops():
    """Calls collectives of te_fl.ops with a group's communicator: in place and not, empty, and on NumPy arrays."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    comm = communicator.of(None, CPU)
    x = values(rank)
    y, z, none = torch.empty_like(x), x.clone(), torch.empty(0, 3)
    te_fl.ops.all_reduce(input=x, output=y, comm=comm)
    te_fl.ops.all_reduce(input=z, output=z, comm=comm, reduction=1)
    te_fl.ops.all_reduce(input=none, output=none, comm=comm)
    te_fl.ops.barrier(comm=comm)
    whole = torch.zeros(ranks, 3, 2)
    whole[rank] = x
    te_fl.ops.all_gather(input=whole[rank], output=whole, comm=comm)
    array = x.numpy().copy()
    te_fl.ops.broadcast(data=array, comm=comm, root=1)
    number, numbers = torch.tensor(float(rank)), torch.empty(1, ranks)
    te_fl.ops.all_gather(input=number, output=numbers, comm=comm)
    swapped, part = torch.empty(1, 2 * ranks), torch.empty(1, 1)
    te_fl.ops.all_to_all(input=torch.arange(2.0 * ranks) + 100 * rank, output=swapped, comm=comm)
    te_fl.ops.reduce_scatter(input=numbers, output=part, comm=comm, reduction="avg")
    every = [values(r) for r in range(ranks)]
    results = [(x, values(rank)), (y, sum(every)), (z, every[-1]), (whole, torch.stack(every)), (torch.from_numpy(array), every[1]),
               (numbers, torch.arange(1.0 * ranks)[None]), (swapped[0], torch.cat([torch.arange(2.0) + 2 * rank + 100 * r for r in range(ranks)])),
               (part, torch.full((1, 1), float(rank)))]
    wrong = [catch_error(te_fl.ops.all_reduce, input=x, output=y, comm=3), catch_error(te_fl.ops.all_reduce, input=x, output=y, comm=comm, stream=1),
             catch_error(te_fl.ops.barrier), catch_error(te_fl.ops.broadcast, data=x, comm=comm, root=ranks)]
    return results, wrong


def seen():
    """Returns the reports of explain, usage and a trace about collectives."""
    x = torch.ones(3)
    explained = te_fl.explain("all_reduce", input=x, output=x, comm=communicator.of(None, CPU))
    te_fl.reset_usage()
    path = f"{sys.argv[3]}.trace.{dist.get_rank()}"  # in the folder of the ranks' store, which exists until they have ended
    with environment(TE_FL_TRACE=path):
        collectives.all_reduce(x)
        collectives.broadcast(x, 0)
        collectives.all_reduce(x, wait=False).wait()
        collectives.barrier()
        te_fl.write_trace()
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    traced = [(e["name"], e["args"]["impl"]) for e in events if e.get("cat") == "call"]
    return explained, {row["op"]: (row["impl_id"], row["calls"]) for row in te_fl.usage()}, traced


@contextlib.contextmanager
def environment(**variables):
    os.environ.update(variables)
    te_fl.reload()
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        te_fl.reload()


def denied():
    """Returns the errors of calls that the policy or the op refuses, the result of the next call, and the usage counts."""
    x = torch.ones(2)
    collectives.reset_counts()
    errors = []
    for settings in ({"per_op": {"all_reduce": "reference"}}, {"deny_vendors": "torch"}, {"allow_vendors": "nvidia"}):
        with te_fl.policy(**settings):
            errors.append(catch_error(collectives.all_reduce, x))
    with te_fl.policy(per_op={"all_reduce": "reference"}):
        collectives.broadcast(torch.ones(2), 0)
    errors += [catch_error(collectives.all_reduce, torch.ones(2, dtype=torch.int16)), catch_error(collectives.all_reduce, x, None, "min"),
               catch_error(collectives.all_gather_into, torch.empty(5), x)]
    collectives.all_reduce(x)
    return errors, x, {key: tuple(count) for key, count in collectives.counts().items()}


def ended():
    """Returns the errors of a communicator whose group was destroyed and of one whose group was freed, and whether both are freed."""
    group = dist.new_group(list(range(dist.get_world_size())))
    comm, x = communicator.of(group, CPU), torch.ones(1)
    te_fl.ops.all_reduce(input=x, output=x, comm=comm)
    same, known = communicator.of(group, CPU) is comm, weakref.ref(group)
    dist.destroy_process_group(group)
    errors = [catch_error(te_fl.ops.all_reduce, input=x, output=x, comm=comm)]
    del group
    gc.collect()
    errors.append(catch_error(te_fl.ops.all_reduce, input=x, output=x, comm=comm))
    return errors, same, known() is None


def own_errors():
    """Returns torch.distributed's error if the other rank does not arrive: its type, and its text about the call."""
    group = dist.new_group(list(range(dist.get_world_size())), timeout=datetime.timedelta(seconds=1))
    collectives.barrier(group)
    if dist.get_rank() == 1:
        return None
    try:
        collectives.all_reduce(torch.ones(4, 3), group)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", str(error).split("\n")[-1:])


def compared():
    """With TE_FL_VALIDATE=1, returns the results of equal calls, and the errors if ranks differ in shape or op and if a rank does not call."""
    rank, ranks = dist.get_rank(), list(range(dist.get_world_size()))
    results = []
    with environment(TE_FL_VALIDATE="1", TE_FL_COMM_TIMEOUT_MS="1000"):
        for call in (lambda group: collectives.all_reduce(torch.ones(2 + rank), group),
                     lambda group: collectives.all_reduce(torch.ones(2), group) if rank else collectives.broadcast(torch.ones(2), 0, group),
                     lambda group: rank or collectives.all_reduce(torch.ones(2), group)):
            group = dist.new_group(ranks)
            x = torch.ones(2)
            collectives.all_reduce(x, group)
            collectives.all_reduce(x, group)
            results.append((x.tolist(), catch_error(call, group)))
    return results


def compared_with_unlike_settings():
    """Returns the error of the first collective of a group whose second rank has another policy (TE_FL_VALIDATE)."""
    own = {"TE_FL_STRICT": "1"} if dist.get_rank() else {}
    with environment(TE_FL_VALIDATE="1", TE_FL_COMM_TIMEOUT_MS="5000", **own):
        group = dist.new_group(list(range(dist.get_world_size())))
        return catch_error(lambda group: collectives.all_reduce(torch.ones(2), group), group)


def compared_by_one():
    """Returns the error, and its delay, of the first collective of a group in which only the first rank compares calls (TE_FL_VALIDATE)."""
    group = dist.new_group(list(range(dist.get_world_size())), timeout=datetime.timedelta(seconds=2))
    with environment(TE_FL_VALIDATE="0" if dist.get_rank() else "1"):
        begin = time.monotonic()
        error = catch_error(lambda group: collectives.all_reduce(torch.ones(2), group), group)
        return error, time.monotonic() - begin
