"""The functions that each rank runs for expert_parallel_test.py."""

import contextlib
import copy
import os
import signal
import time
from unittest import mock

import torch
import torch.distributed as dist

import te_fl.pytorch as te
from te_fl.common.recipe import Float8BlockScaling, Float8CurrentScaling
from te_fl.pytorch.distributed import collectives
from te_fl.pytorch.functions import expert_parallel
from trouble_cases import catch_error

HIDDEN, OUT, EXPERTS, TOP = 24, 16, 8, 2
TOKENS = (7, 0, 12, 1)  # of each rank; one has none


def tokens_of(rank, ranks):
    """The range of tokens of a rank, among the same 20 for every number of ranks."""
    per = len(TOKENS) // ranks
    ends = [sum(TOKENS[:(r + 1) * per]) for r in range(ranks)]
    return slice(ends[rank - 1] if rank else 0, ends[rank])


def problem(chosen="random"):
    """Returns tokens [20, H], probabilities [20, E] with zeros, the routing map, gradients of the result, and a weight for each expert."""
    generator = torch.Generator().manual_seed(3)
    count = sum(TOKENS)
    x = torch.randn(count, HIDDEN, generator=generator)
    scores = torch.rand(count, EXPERTS, generator=generator)
    if chosen == "first rank's":  # experts 0 and 1 belong to rank 0 at each degree
        scores[:, :TOP] += 1
    elif chosen == "last":
        scores[:, -1] += 1
    routing = torch.zeros(count, EXPERTS, dtype=torch.bool).scatter_(1, scores.topk(TOP).indices, True)
    probs = torch.where(routing, scores, 0.0)
    return x, probs, routing, torch.randn(count, OUT, generator=generator), torch.randn(EXPERTS, OUT, HIDDEN, generator=generator)


def mixture(x, probs, routing, weights, group, transfer=True, **options):
    """A mixture of experts whose GroupedLinear has the weights of this rank's experts. Without transfer: all experts, and no rank but this."""
    rows, row_probs, row_map = te.moe_permute_with_probs(x, probs, routing, int(routing.sum()))
    counts = routing.sum(0)
    experts = te.GroupedLinear(len(weights), HIDDEN, OUT, bias=False, device="cpu")
    with torch.no_grad():
        for i, weight in enumerate(weights):
            getattr(experts, f"weight{i}").copy_(weight)
    if transfer:
        rows, row_probs, handle = te.moe_dispatch(rows, counts, group, probs=row_probs, **options)
        splits = handle.splits
    else:
        splits = counts.tolist()
    out = experts(rows, splits) * row_probs[:, None]
    if transfer:
        out = te.moe_combine(out, handle)
    y = te.moe_unpermute(out, row_map, restore_shape=torch.Size((len(x), OUT)))
    return y, [getattr(experts, f"weight{i}") for i in range(len(weights))]


def run_mixture(chosen, rank, ranks, transfer=True, **options):
    x, probs, routing, grads, weights = problem(chosen)
    mine, each = tokens_of(rank, ranks), EXPERTS // ranks
    x, probs = x[mine].clone().requires_grad_(), probs[mine].clone().requires_grad_()
    y, parameters = mixture(x, probs, routing[mine], weights[rank * each:(rank + 1) * each], None, transfer, **options)
    y.backward(grads[mine])
    return y.detach(), x.grad, probs.grad, [p.grad for p in parameters]


def mixtures():
    """Returns the mixture's results and gradients over the ranks by the choice of experts and by option."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = {chosen: run_mixture(chosen, rank, ranks) for chosen in ("random", "first rank's", "last")}
    results["capacity"] = run_mixture("random", rank, ranks, capacity=24)
    return tokens_of(rank, ranks), results


def one_rank():
    """Returns those of one rank with all experts, without transfers."""
    return {chosen: run_mixture(chosen, 0, 1, transfer=False) for chosen in ("random", "first rank's", "last")}


def tagged(rank, ranks, each):
    """Rows whose numbers say where they come from: rank, expert, number among those; and the numbers of rows. Rank 1 has none."""
    experts = each * ranks
    counts = [0 if rank == 1 else (rank * 3 + e * 2) % 4 for e in range(experts)]
    rows = [[float(rank), float(e), float(i)] for e in range(experts) for i in range(counts[e])]
    return torch.tensor(rows).view(-1, 3), counts


def order():
    """Returns by case (received rows, probabilities, splits, numbers of tokens, what was expected) and the returned rows with the sent ones."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = {}
    for each in (1, 3, 60):  # the last is more than one message holds
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rows, counts = tagged(rank, ranks, each)
            rows = rows.to(dtype)
            want = [[r, rank * each + e, i] for e in range(each) for r in range(ranks) for i in range(tagged(r, ranks, each)[1][rank * each + e])]
            for numbers in (counts, torch.tensor(counts), torch.tensor(counts, dtype=torch.int32)):
                got, probs, handle = te.moe_dispatch(rows, numbers, None, probs=rows[:, 2].contiguous())
                back = te.moe_combine(got, handle)
            results[each, str(dtype)] = (got, probs, handle.splits, handle.tokens_per_expert.tolist(), torch.tensor(want, dtype=dtype).view(-1, 3), back, rows)
    return results


def capacities():
    """Returns for capacity 1 to 3 the received rows and what was expected, the dropped number, and the rows that came back with their expected form;
    and the gradient of the sent rows."""
    rank, ranks, each = dist.get_rank(), dist.get_world_size(), 2
    results = {}
    for capacity in (1, 2, 3):
        rows, counts = tagged(rank, ranks, each)
        rows = (rows + 1).requires_grad_()
        got, _, handle = te.moe_dispatch(rows, counts, None, capacity=capacity)
        want = torch.zeros(each, ranks, capacity, 3)
        arrived = []
        for e in range(each):
            arrived.append(0)
            for r in range(ranks):
                sent = min(capacity, tagged(r, ranks, each)[1][rank * each + e])
                arrived[-1] += sent
                for i in range(sent):
                    want[e, r, i] = torch.tensor([r, rank * each + e, i]) + 1.0
        back = te.moe_combine(got * 2, handle)
        back.sum().backward()
        kept = torch.tensor([i < capacity for n in counts for i in range(n)], dtype=torch.float32).view(-1, 1)
        results[capacity] = (got.detach(), want.view(-1, 3), handle.splits, [ranks * capacity] * each, handle.tokens_per_expert.tolist(), arrived,
                             int(handle.dropped), int((1 - kept).sum()), back.detach(), 2 * kept * rows.detach(), rows.grad, (2 * kept).expand(-1, 3))
    return results


def codes():
    """Returns rows sent as codes with the rows as they were: numbers that E4M3 holds, and random ones; the gradient; and with capacity."""
    rank, ranks, each, hidden = dist.get_rank(), dist.get_world_size(), 2, 200
    counts = [0 if rank == 1 else 3 + (rank + e) % 2 for e in range(each * ranks)]
    generator = torch.Generator().manual_seed(rank)
    exact = torch.randint(-8, 9, (sum(counts), hidden), generator=generator) * 2.0 ** torch.randint(-3, 4, (sum(counts), 1), generator=generator)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, rows in (("exact", exact), ("random", torch.randn(sum(counts), hidden, generator=generator))):
            for capacity in (None, 4):
                sent = rows.to(dtype).clone().requires_grad_()
                plain = te.moe_dispatch(sent.detach(), counts, None, capacity=capacity)
                got, probs, handle = te.moe_dispatch(sent, counts, None, probs=sent.detach()[:, 0].contiguous(), capacity=capacity, fp8=True)
                te.moe_combine(got, handle).backward(rows.to(dtype))
                results[str(dtype), name, capacity] = got.detach(), plain.rows, probs, plain.rows[:, 0], sent.grad, rows.to(dtype)
    return results


def wrong_calls():
    """Returns the errors of calls in which rank 1, or all ranks, have wrong arguments, and after them the result of a right call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, counts = torch.ones(4, 8), [1] * 4
    odd = rank == 1

    def call(inp=x, tokens=counts, **options):
        return catch_error(lambda: te.moe_dispatch(inp, tokens, None, **options))
    errors = [call(tokens=[1, 1, 1, 2] if odd else counts), call(tokens=[2, 2, 2, -2] if odd else counts), call(tokens=[1, 1, 1, 1, 0, 0] if odd else counts),
              call(torch.ones(4, 16) if odd else x), call(x.bfloat16() if odd else x), call(probs=torch.ones(4) if odd else None),
              call(fp8=odd), call(capacity=3 if odd else None), call(capacity=3 if odd else 2), call(torch.ones(4, 8, 1) if odd else x),
              call(tokens=[1, 1, 2] if odd else counts), call(tokens="counts" if odd else counts), call(probs=torch.ones(3) if odd else torch.ones(4)),
              call(capacity=0), call(x.to(torch.int32)), call(torch.ones(3, 8) if odd else x, capacity=2)]
    got, _, handle = te.moe_dispatch(x, counts, None)
    local = [catch_error(lambda: te.moe_combine(torch.ones(5, 8), handle)), catch_error(lambda: te.moe_combine(got, None))]
    return errors, local, torch.equal(te.moe_combine(got, handle), x), ranks


def counted():
    """Returns the collectives of a forward and of a backward with probabilities, as (calls, bytes), and what they must be."""
    rank, ranks, each = dist.get_rank(), dist.get_world_size(), 2
    rows, counts = tagged(rank, ranks, each)
    rows.requires_grad_()
    probs = torch.ones(len(rows), requires_grad=True)
    collectives.reset_counts()
    got, moved, handle = te.moe_dispatch(rows, counts, None, probs=probs)
    out = te.moe_combine(got * moved[:, None], handle)
    forward = {name: tuple(count) for (name, _), count in collectives.counts().items()}
    collectives.reset_counts()
    out.sum().backward()
    backward = {name: tuple(count) for (name, _), count in collectives.counts().items()}
    larger = max(len(rows), len(got)) * 3 * 4
    return forward, backward, larger


@contextlib.contextmanager
def recorded(events):
    """Appends the beginnings and ends of transfers to events."""
    flight = expert_parallel._Flight
    begin, end = flight.begin, flight.end

    def begins(self, tensors, reverse=False):
        events.append("gradients begin" if reverse else "rows begin")
        return begin(self, tensors, reverse)

    def ends(self):
        events.append("end")
        return end(self)
    with mock.patch.object(flight, "begin", begins), mock.patch.object(flight, "end", ends):
        yield


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, events, name):
        ctx.events, ctx.name = events, name
        events.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append(f"backward of {ctx.name}")
        return grad, None, None


def overlapped():
    """Returns the order of events in which a shared expert runs while rows travel, and its results and gradients with those of plain calls."""
    rank, ranks, each = dist.get_rank(), dist.get_world_size(), 2
    rows, counts = tagged(rank, ranks, each)
    results, events = [], []
    with recorded(events):
        for overlaps in (True, False):
            x, token = (rows + 1).requires_grad_(), torch.full((1, 3), 2.0, requires_grad=True)
            if overlaps:
                transfer = te.start_moe_dispatch(x, counts)
                shared = Noted.apply(token * 3, events, "shared expert")
                got, _, handle = transfer.wait()
                transfer = te.start_moe_combine(got * got, handle)
                second = Noted.apply(shared * 2, events, "second part")
                y = transfer.wait()
            else:
                got, _, handle = te.moe_dispatch(x, counts)
                y, second = te.moe_combine(got * got, handle), token * 6
            order = list(events) if overlaps else order
            (y.sum() + second.sum()).backward()
            order_backward = events[len(order):] if overlaps else order_backward
            results.append((y.detach(), x.grad, token.grad))
    twice = te.start_moe_dispatch(rows, counts)
    twice.wait()
    return order, order_backward, results, catch_error(twice.wait)


def recomputed():
    """The gradient through te.checkpoint around a dispatch, experts and combine, and without."""
    rank, ranks, each = dist.get_rank(), dist.get_world_size(), 2
    rows, counts = tagged(rank, ranks, each)

    def experts(x):
        got, _, handle = te.moe_dispatch(x, counts)
        return te.moe_combine(got * got * got, handle)
    grads = []
    for function in (experts, lambda x: te.checkpoint(experts, x, use_reentrant=False)):
        x = (rows + 1).requires_grad_()
        function(x).sum().backward()
        grads.append(x.grad)
    return grads


def learning():
    """Returns the losses of ten steps of a mixture in BF16 and by blocks in FP8: with this degree, the experts divided, the tokens too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = {}
    for name, dtype, recipe, fp8 in (("float32", torch.float32, None, False), ("block", torch.bfloat16, Float8BlockScaling(), False)):
        losses[name] = train(rank, ranks, dtype, recipe, fp8)
    return losses


def train(rank, ranks, dtype, recipe, fp8, hidden=128, count=64, steps=10):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, hidden, generator=generator)
    target = torch.tanh(x @ torch.randn(hidden, hidden, generator=generator) / hidden ** 0.5)
    weights = torch.randn(EXPERTS, hidden, hidden, generator=generator) / hidden ** 0.5
    gate = (torch.randn(hidden, EXPERTS, generator=generator) / hidden ** 0.5).requires_grad_()
    each, mine = EXPERTS // ranks, slice(rank * count // ranks, (rank + 1) * count // ranks)
    experts = te.GroupedLinear(each, hidden, hidden, bias=False, params_dtype=dtype, device="cpu")
    with torch.no_grad():
        for i in range(each):
            getattr(experts, f"weight{i}").copy_(weights[rank * each + i])
    optimizer = torch.optim.SGD([*experts.parameters(), gate], lr=2.0)
    x, target, losses = x[mine], target[mine], []
    for _ in range(steps):
        scores = (x @ gate).softmax(-1)
        chosen = scores.topk(TOP).indices
        routing = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        rows, row_probs, row_map = te.moe_permute_with_probs(x.to(dtype), torch.where(routing, scores, 0.0), routing, routing.sum().item())
        # The rows of each expert are padded to a multiple of 16 over all ranks: this test's recipe has no padding of its own.
        rows, row_probs, handle = te.moe_dispatch(rows, routing.sum(0), None, probs=row_probs, fp8=fp8, **({} if recipe is None else {"capacity": 64}))
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = experts(rows, handle.splits)
        out = te.moe_combine(out * row_probs[:, None].to(out.dtype), handle)
        y = te.moe_unpermute(out, row_map, restore_shape=torch.Size(x.shape))
        loss = (y.float() - target).square().sum() / (count * hidden)
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(gate.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def module(ranks, rank, group, options):
    """A MoELayer with this rank's experts of one with all experts."""
    torch.manual_seed(9)
    options = {"init_method": lambda t: torch.nn.init.normal_(t, std=0.2), **options}
    whole = te.MoELayer(64, 48, EXPERTS, TOP, device="cpu", **options)
    if group is None:
        return whole
    mine, each = te.MoELayer(64, 48, EXPERTS, TOP, device="cpu", ep_group=group, **options), EXPERTS // ranks
    state = {name: value[rank * each:(rank + 1) * each] if name.startswith("fc") else value for name, value in whole.state_dict().items()
             if isinstance(value, torch.Tensor)}
    mine.load_state_dict(state, strict=False)
    return mine


MODULES = {"plain": {}, "biases and shared experts": {"bias": True, "activation": "gelu", "shared_ffn_hidden_size": 32},
           "in FP8": {}}


def module_losses(divided=True):
    """Returns the losses of ten steps of each of MODULES, divided over the ranks or on this rank alone with all tokens."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if divided else (0, 1)
    group = dist.group.WORLD if divided else None
    x = torch.randn(sum(TOKENS), 64, generator=torch.Generator().manual_seed(4))
    target, tokens, results = x.roll(1, 1), tokens_of(rank, ranks), {}
    for name, options in MODULES.items():
        layer, losses = module(ranks, rank, group, options), []
        dtype = options.get("params_dtype", torch.float32)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        for _ in range(10):
            with te.autocast(enabled=name == "in FP8", recipe=Float8CurrentScaling()):
                y = layer(x[tokens].to(dtype))
            loss = (y.float() - target[tokens]).square().sum() / target.numel()
            optimizer.zero_grad()
            loss.backward()
            total = loss.detach().clone()
            if divided:
                dist.all_reduce(total)
                for key, p in layer.named_parameters():
                    if not key.startswith("fc"):
                        dist.all_reduce(p.grad)
            optimizer.step()
            losses.append(total.item())
        results[name] = losses
    return results


def module_mistakes():
    """Returns the errors of a MoELayer with a group: experts that do not divide, another group's size, a copy without a group."""
    layer = module(dist.get_world_size(), dist.get_rank(), dist.group.WORLD, {})
    copied, x = copy.deepcopy(layer), torch.ones(2, 64)
    errors = [catch_error(lambda: te.MoELayer(8, 8, 5, device="cpu", ep_group=dist.group.WORLD)), catch_error(lambda: layer.set_expert_parallel_group(None)),
              catch_error(lambda: copied(x))]
    copied.set_expert_parallel_group(dist.group.WORLD)
    return errors, torch.equal(copied(x), layer(x)), layer.fc1_weight.shape[0]


def killed():
    """Rank 1 is killed between dispatch and combine. Returns the error of combine with its notes, and the seconds that it took."""
    x = torch.ones(4, 8)
    for _ in range(2):
        got, _, handle = te.moe_dispatch(x, [1] * 4)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        te.moe_combine(got, handle)
    except RuntimeError as error:
        return str(error), getattr(error, "__notes__", str(error).split("\n")[-1:]), time.monotonic() - begin
