"""Cases of context parallelism in trouble: where one rank refuses a call, all refuse it with the same words, and the group works on."""

import copy

import torch
import torch.distributed as dist

import te_fl.pytorch as te
from context_cases import DIM, HEADS, Case, groups_of, sums, tokens_of
from te_fl import errors, ops
from te_fl.pytorch.distributed import collectives, context_batches
from te_fl.pytorch.runtime.constants import CPLoadBalancingStrategy


def refused_by_all(kind, words, call):
    """Raises AssertionError unless call() raises this kind of error on all ranks, with one text that has the words."""
    text = "nothing was refused"
    try:
        call()
    except kind as error:
        text = str(error)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, text)
    assert len(set(every)) == 1, every
    for word in words:
        assert word in text, f"{text!r} does not say {word!r}"


def _attend(group, kind, q, k=None, **options):
    k = q if k is None else k
    return te.DotProductAttention(q.shape[-2], DIM, num_gqa_groups=k.shape[-2], qkv_format="bshd", cp_group=group, cp_comm_type=kind, **options)(q, k, k)


def case_lengths(ranks):
    for size, rank, group, kind in groups_of(ranks):
        odd, other = (torch.randn(2, n if ranks.rank % size == size - 1 else 8, 8, DIM) for n in (7, 16))
        refused_by_all(errors.InvalidArgument, ("query_layer has 7 tokens", f"pad the sequences to a multiple of {2 * size} tokens"),
                       lambda: _attend(group, kind, odd))
        if kind != "a2a+p2p":  # there the ranks of a pair find other numbers in the message than those of the next
            refused_by_all(errors.InvalidArgument, ("make different calls", "[2, 8, 8, 8]", "[2, 16, 8, 8]", "equal lengths"), lambda: _attend(group, kind, other))
        packed = torch.randn(8, 8, DIM)
        module = te.DotProductAttention(8, DIM, qkv_format="thd", attn_mask_type="padding_causal", cp_group=group, cp_comm_type=kind)
        refused_by_all(errors.InvalidArgument, ("sequence 1 of cu_seqlens_q has 5 tokens", f"multiple of {2 * size}"),
                       lambda: module(packed, packed, packed, cu_seqlens_q=sums([2 * size, 5, 8 * size - 2 * size - 5])))
        refused_by_all(errors.InvalidArgument, (f"cu_seqlens_q ends at {4 * size}", "this rank has 8 tokens"),
                       lambda: module(packed, packed, packed, cu_seqlens_q=sums([4 * size])))
        Case(size, rank, heads=8, groups=4).check(Case(size, rank, heads=8, groups=4).module(group, kind), what="after a refusal")


def case_one_rank_refuses(ranks):
    """A call that only the last rank gets wrong."""
    for size, rank, group, kind in groups_of(ranks):
        wrong = ranks.rank == ranks.world - 1
        if size != ranks.world:
            continue
        q = torch.randn(2, 8, 8, DIM + wrong)
        refused_by_all(errors.InvalidArgument, ("query_layer is (2, 8, 8, 9)", "[batch, sequence, 8, 8]", "of cp_group"), lambda: _attend(group, kind, q))
        q = torch.randn(2, 8, 8, DIM)
        refused_by_all(errors.InvalidArgument, ("make different calls", "window (2, -1)"),
                       lambda: _attend(group, "all_gather" if "p2p" in kind else kind, q, window_size=(2, 0) if wrong else None)
                       if not isinstance(group, list) else _attend(ranks.groups[size], "a2a", q, window_size=(2, 0) if wrong else None))


def case_what_a_form_does_not_compute(ranks):
    for size, rank, group, kind in groups_of(ranks):
        q = torch.randn(2, 8, 8, DIM)
        if "p2p" in kind:
            refused_by_all(errors.Unsupported, ("window_size", "'all_gather' or 'a2a'"), lambda: _attend(group, kind, q, window_size=(2, 0)))
        if "a2a" in kind:
            refused_by_all(errors.InvalidArgument, ("1 groups of keys do not divide", "'p2p' or 'all_gather'"), lambda: _attend(group, kind, q, q[:, :, :1]))
        if kind != "a2a":
            module = te.DotProductAttention(8, DIM, qkv_format="bshd", attn_mask_type="arbitrary", cp_group=group, cp_comm_type=kind)
            refused_by_all(errors.Unsupported, ("attn_mask_type", "cp_comm_type='a2a'"),
                           lambda: module(q, q, q, attention_mask=torch.zeros(1, 1, 8 * size, 8 * size, dtype=torch.bool)))


def case_keys_of_other_lengths(ranks):
    """A causal mask over sequences with other numbers of keys than of queries: positions of chunks do not tell what a query sees."""
    for size, rank, group, kind in groups_of(ranks):
        if kind == "a2a":
            continue
        q = torch.randn(8, 8, DIM)
        lengths = dict(cu_seqlens_q=sums([4 * size, 4 * size]), cu_seqlens_kv=sums([2 * size, 6 * size]))
        module = te.DotProductAttention(8, DIM, qkv_format="thd", attn_mask_type="padding_causal", cp_group=group, cp_comm_type=kind)
        refused_by_all(errors.Unsupported, ("as many keys as queries", "cp_comm_type='a2a'"), lambda: module(q, q, q, **lengths))
        padded = dict(cu_seqlens_q_padded=sums([8 * size]), cu_seqlens_kv_padded=sums([8 * size]))
        refused_by_all(errors.Unsupported, ("as many keys as queries",), lambda: module(
            q, q, q, cu_seqlens_q=sums([5]), cu_seqlens_kv=sums([7]), attn_mask_type="padding_causal_bottom_right", **padded))


class _Fails:
    """Makes an op of this process fail in one of its next calls."""

    def __init__(self, name, at):
        self.name, self.at, self.own = name, at, getattr(ops, name)

    def __enter__(self):
        def fails(**arguments):
            self.at -= 1
            if self.at == 0:
                raise errors.OutOfMemory("4 MiB of 16 GiB; use a smaller batch")
            return self.own(**arguments)
        setattr(ops, self.name, fails)

    def __exit__(self, *_):
        setattr(ops, self.name, self.own)


def case_out_of_memory_on_one_rank(ranks):
    for size, rank, group, kind in groups_of(ranks):
        if "p2p" not in kind or size != ranks.world:
            continue
        for at in (1, 2):
            q = torch.randn(2, 8, 8, DIM, requires_grad=True)
            with _Fails("fused_attn_fwd", at if rank == 1 else 0):
                refused_by_all(errors.OutOfMemory, ("4 MiB of 16 GiB", " ranks of cp_group)"), lambda: _attend(group, kind, q))
            out = _attend(group, kind, q)
            with _Fails("fused_attn_bwd", at if rank == 1 else 0):
                refused_by_all(errors.OutOfMemory, ("4 MiB of 16 GiB", " ranks of cp_group)"), lambda: out.sum().backward())
        case = Case(size, rank, heads=8, groups=4)
        case.check(case.module(group, kind), what="after a failure")


def case_another_group_between_forward_and_backward(ranks):
    """The backward of a forward uses the forward's groups, whatever the module has now."""
    for size, rank, group, kind in groups_of(ranks):
        case = Case(size, rank, heads=8, groups=4)
        module, inputs = case.module(group, kind), case.inputs()
        out = module(*inputs).view_as(inputs[0])
        module.set_context_parallel_group(None)
        out.backward(case.own(case.grad))
        assert torch.allclose(inputs[1].grad.double(), case.own(case.whole[1].grad).double(), atol=1e-4)


def case_wrong_arguments(ranks):
    group, size = ranks.groups[ranks.world], ranks.world
    make = lambda **k: te.DotProductAttention(HEADS, DIM, qkv_format="bshd", **k)  # noqa: E731
    refused_by_all(errors.InvalidArgument, ("cp_comm_type", "'ring'", "p2p"), lambda: make(cp_group=group, cp_comm_type="ring"))
    refused_by_all(errors.InvalidArgument, ("one process group", "a list of two"), lambda: make(cp_group=group, cp_comm_type="a2a+p2p"))
    refused_by_all(errors.InvalidArgument, ("a list of 2", "one process group"), lambda: make(cp_group=[group, group], cp_comm_type="p2p"))
    refused_by_all(errors.InvalidArgument, ("cp_global_ranks is [0]", f"{size} ranks"), lambda: make(cp_group=group, cp_global_ranks=[0]))
    refused_by_all(TypeError, ("load_balancing_strategy",), lambda: make().set_context_parallel_group(group, load_balancing_strategy="none"))
    q = torch.randn(2, 4, HEADS, DIM)
    for other in (copy.deepcopy(make(cp_group=group)), copy.deepcopy(copy.deepcopy(make(cp_group=group)))):
        refused_by_all(errors.FailedPrecondition, ("is a copy", "set_context_parallel_group"), lambda other=other: other(q, q, q))
    other.set_context_parallel_group(group)
    assert torch.equal(other(q, q, q), make(cp_group=group)(q, q, q))
    gone = dist.new_group()
    module = make(cp_group=gone)
    dist.destroy_process_group(gone)
    refused_by_all(errors.FailedPrecondition, ("destroyed",), lambda: module(q, q, q))


def case_bytes_of_each_form(ranks):
    """The numbers of calls and the bytes that each form sends, counted: under a causal mask p2p sends half of the keys to higher ranks."""
    for size, rank, group, kind in groups_of(ranks):
        if isinstance(group, list) or size != 2:
            continue
        case = Case(size, rank, heads=8, groups=4)
        module = case.module(group, kind)
        collectives.reset_counts()
        case.check(module)
        counts = {name: count for (name, _), count in collectives.counts().items()}
        whole = 4 * sum(case.own(x).numel() for x in case.whole[1:])  # bytes of this rank's keys and values
        q = 4 * case.own(case.whole[0]).numel()
        assert counts["all_gather"].calls == {"p2p": 5, "all_gather": 2, "a2a": 2}[kind], counts
        if kind == "p2p":  # forward: keys; backward: keys, and their gradients the other way
            half = [whole // 2, whole]  # to the higher rank and to the lower one
            assert counts["send"].calls == 3 and counts["send"].bytes == 2 * half[rank] + half[1 - rank], (counts, whole)
        elif kind == "a2a":
            assert counts["all_to_all"].calls == 4 and counts["all_to_all"].bytes == 2 * (q + whole) + 2 * q, counts
        else:
            assert counts["all_to_all"].calls == 1 and counts["all_to_all"].bytes == whole * size, counts


def case_batches(ranks):
    """The helpers that pad sequences and take a rank's tokens, against sequences padded and cut one by one; attention to one contiguous piece."""
    for size, rank, group, _ in list(groups_of(ranks))[:1]:
        lengths, factor = [3, 8, 1], 2 * size
        ids = torch.arange(1, 13)
        padded, labels, cu = context_batches.pad_thd_sequences_for_cp(ids[None], ids[None], sums(lengths), factor, 0, -1)
        up = [-(-n // factor) * factor for n in lengths]
        want = torch.cat([torch.nn.functional.pad(part, (0, n - len(part))) for part, n in zip(ids.split(lengths), up)])
        assert torch.equal(padded, want) and torch.equal(labels == -1, want == 0) and cu.tolist() == sums(up).tolist()
        places = context_batches.generate_positional_ids_for_cp(sums(lengths), factor)
        assert torch.equal(places, torch.cat([torch.arange(n) for n in up]))
        mine = tokens_of(up, rank, size)
        found = context_batches.get_batch_on_this_cp_rank(cu, padded[None], labels, None, group)
        assert torch.equal(found[0], want[None, mine]) and torch.equal(found[1], labels[mine]) and found[2] is None
        assert torch.equal(context_batches.get_thd_partitioned_indices(cu, sum(up), size, rank).long(), mine)
        own = context_batches.get_cu_seqlens_on_cp_rank(sums(lengths), sums(up) // size, size, rank, True, True)
        assert own.tolist() == sums([int((part != 0).sum()) for part in want[mine].split([n // size for n in up])]).tolist()
        refused_by_all(errors.InvalidArgument, ("multiples of", "pad_thd_sequences_for_cp"), lambda: context_batches.get_batch_on_this_cp_rank(sums([5]), ids[:5], None, None, group))
        case = Case(size, rank, "thd", tokens=[4 * size - 1, 8 * size, 2 * size + 1])
        case.mine = torch.arange(16 * size).chunk(size)[rank]
        module = case.module(group, "all_gather")
        module.set_context_parallel_group(group, None, None, "all_gather", CPLoadBalancingStrategy.NO_LOAD_BALANCE)
        case.check(module, what="one piece for each rank")
