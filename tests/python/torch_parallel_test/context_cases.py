"""Cases for attention over sequences that ranks divide (context parallelism), against PyTorch's attention to the whole sequences in FP64."""

import torch

import te_fl.pytorch as te
from common import close
from te_fl.pytorch.distributed import collectives

HEADS, GROUPS, DIM = 4, 2, 8
KINDS = ("p2p", "all_gather", "a2a")


def exact(q, k, v, causal, window=(-1, -1), sink=None, softcap=0.0, bias=None):
    """Attention for [B, S, H, D] in FP64. sink: [H] logits."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias.double()
    behind = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    hidden = (behind > 0) & causal
    hidden |= (behind < -window[0]) & (window[0] >= 0)
    hidden |= (behind > window[1]) & (window[1] >= 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)
    return (weights[..., :k.shape[2]] @ v).transpose(1, 2)


def tokens_of(lengths, rank, size):
    """A rank's tokens of sequences with these padded lengths: chunks rank and 2 size - 1 - rank of 2 size."""
    numbers, begin = [], 0
    for n in lengths:
        chunk = n // (2 * size)
        for c in (rank, 2 * size - 1 - rank):
            numbers += range(begin + c * chunk, begin + (c + 1) * chunk)
        begin += n
    return torch.tensor(numbers)


def sums(lengths):
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


class Case:
    """One rank's part of an attention to whole sequences, and what it must be. device: where the part is computed."""

    device = "cpu"

    def __init__(self, size, rank, layout="bshd", causal=True, dtype=torch.float32, heads=HEADS, groups=GROUPS, dim=DIM, value_dim=None, tokens=None,
                 window=(-1, -1), sink=None, softcap=0.0, bias=None):
        torch.manual_seed(5)
        self.layout, self.causal, self.heads, self.groups, self.dim, self.value_dim = layout, causal, heads, groups, dim, value_dim or dim
        self.padded = [4 * size, 8 * size, 4 * size] if layout == "thd" else [8 * size]
        self.tokens = tokens or self.padded
        lead = (sum(self.padded),) if layout == "thd" else (2, self.padded[0])
        self.whole = [torch.randn(*lead, n, d).to(dtype).requires_grad_() for n, d in ((heads, dim), (groups, dim), (groups, self.value_dim))]
        self.grad = torch.randn(*lead, heads, self.value_dim).to(dtype)
        self.mine = tokens_of(self.padded, rank, size)
        self.sink = None if sink is None else sink.clone().requires_grad_()
        self.bias = None if bias is None else bias.clone().requires_grad_()
        more = dict(causal=causal, window=window, sink=self.sink, softcap=softcap, bias=self.bias)
        if layout == "thd":
            parts = zip(self.tokens, zip(*(x.split(self.padded) for x in self.whole)))
            self.want = torch.cat([self._grown(exact(*(x[:n].unsqueeze(0) for x in qkv), **more)[0], len(qkv[0])) for n, qkv in parts])
        else:
            n = self.tokens[0] if tokens else self.padded[0]
            self.want = self._grown(exact(*(x[:, :n] for x in self.whole), **more).transpose(0, 1), self.padded[0]).transpose(0, 1)
        self.want.backward(self.grad.double())

    @staticmethod
    def _grown(x, rows):
        return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - x.shape[0]))

    def own(self, x):
        if self.layout == "thd":
            return x[self.mine]
        return x[:, self.mine].transpose(0, 1).contiguous() if self.layout == "sbhd" else x[:, self.mine]

    def module(self, group, kind, **options):
        mask = "causal" if self.causal else "no_mask"
        if self.layout == "thd" or self.tokens is not self.padded:
            mask = "padding_causal" if self.causal else "padding"
        return te.DotProductAttention(self.heads, (self.dim, self.value_dim), num_gqa_groups=self.groups, qkv_format=self.layout, attn_mask_type=mask,
                                      cp_group=group, cp_comm_type=kind, **options)

    def inputs(self):
        return [self.own(x.detach()).clone().to(self.device).requires_grad_() for x in self.whole]

    def lengths(self):
        if self.layout != "thd" and self.tokens is self.padded:
            return {}
        cu = sums(self.tokens if self.layout == "thd" else self.tokens * 2).to(self.device)
        found = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu)
        if self.layout == "thd":
            found.update(cu_seqlens_q_padded=sums(self.padded).to(self.device), cu_seqlens_kv_padded=sums(self.padded).to(self.device), max_seqlen_q=max(self.padded),
                         max_seqlen_kv=max(self.padded))
        return found

    def check(self, module, relative=None, what="", **call):
        inputs = self.inputs()
        out = module(*inputs, **self.lengths(), **call)
        out = out.view(*inputs[0].shape[:-1], self.value_dim)
        out.backward(self.own(self.grad).to(self.device))
        relative = relative or (2e-2 if out.dtype == torch.bfloat16 else 1e-5)
        for name, got, want in zip(("out", "dq", "dk", "dv"), (out, *(x.grad for x in inputs)), (self.want, *(x.grad for x in self.whole))):
            close(got.double().cpu(), self.own(want).double(), f"{what}: {name}", relative)
        return out, inputs


def groups_of(ranks):
    """(size, rank, cp_group, cp_comm_type) of each form of communication."""
    for size in ranks.degrees():
        for kind in KINDS:
            yield size, ranks.groups[size].rank(), ranks.groups[size], kind
    if ranks.world == 4:
        yield 4, ranks.rank, [ranks.groups[2], ranks.across[2]], "a2a+p2p"


def case_layouts_and_masks(ranks):
    for size, rank, group, kind in groups_of(ranks):
        for layout in ("bshd", "sbhd", "thd"):
            for causal in (True, False):
                for dtype in (torch.float32, torch.bfloat16):
                    case = Case(size, rank, layout, causal, dtype, heads=8, groups=4)
                    case.check(case.module(group, kind), what=f"{kind} of {size}, {layout}, causal {causal}, {dtype}")


def case_a_repeated_call_gives_the_same_bits(ranks):
    for size, rank, group, kind in groups_of(ranks):
        case = Case(size, rank, dtype=torch.bfloat16, heads=8, groups=4)
        module = case.module(group, kind)
        (one, first), (two, second) = case.check(module), case.check(module)
        assert torch.equal(one, two) and all(torch.equal(a.grad, b.grad) for a, b in zip(first, second)), kind


def case_head_sizes_and_groups(ranks):
    """Values of another size than keys (MLA), and one key head for all queries where heads are not divided."""
    for size, rank, group, kind in groups_of(ranks):
        case = Case(size, rank, heads=8, groups=8, dim=12, value_dim=8)
        case.check(case.module(group, kind), what=kind)
        if "a2a" not in kind:
            case = Case(size, rank, heads=4, groups=1)
            case.check(case.module(group, kind), what=kind)


def case_padding(ranks):
    for size, rank, group, kind in groups_of(ranks):
        for causal in (True, False):
            for layout in ("bshd", "sbhd", "thd"):
                n = 4 * size
                case = Case(size, rank, layout, causal, tokens=[n - 3, n + 1, 1] if layout == "thd" else [n + 3], heads=8, groups=4)
                case.check(case.module(group, kind), what=f"{kind}, {layout}, causal {causal}")
                if layout == "bshd":
                    hidden = (torch.arange(8 * size) >= n + 3).expand(2, 1, 1, -1)
                    inputs = case.inputs()
                    out = case.module(group, kind)(*inputs, attention_mask=hidden)
                    close(out.view_as(inputs[0]).double(), case.own(case.want), "with a mask", 1e-5)


def case_windows(ranks):
    for size, rank, group, kind in groups_of(ranks):
        if "p2p" in kind:
            continue
        for layout, causal, window in (("bshd", True, (3, 0)), ("sbhd", False, (3, 2)), ("sbhd", False, (0, 5)), ("thd", True, (3, 0)), ("bshd", True, (30, 0))):
            case = Case(size, rank, layout, causal, window=window, heads=8, groups=4)
            case.check(case.module(group, kind, window_size=window), what=f"{kind}, {layout}, {window}")


def case_sinks_and_caps(ranks):
    for size, rank, group, kind in groups_of(ranks):
        torch.manual_seed(3)
        for softmax_type, sink in (("learnable", torch.randn(8)), ("off-by-one", torch.zeros(8))):
            case = Case(size, rank, "thd" if softmax_type == "learnable" else "bshd", sink=sink, softcap=1.5, heads=8, groups=4)
            module = case.module(group, kind, softmax_type=softmax_type, softcap=1.5)
            if softmax_type == "learnable":
                with torch.no_grad():
                    module.softmax_offset.copy_(sink)
            case.check(module, what=kind)
            if softmax_type == "learnable":
                found = module.softmax_offset.grad.clone()
                if kind != "a2a":  # each rank has the gradient of its own queries
                    for one in (group if isinstance(group, list) else [group])[-1:]:
                        torch.distributed.all_reduce(found, group=one)
                close(found.double(), case.sink.grad.double(), f"{kind}: the sink", 1e-5)


def case_biases(ranks):
    for size, rank, group, kind in groups_of(ranks):
        if "a2a" in kind:
            continue
        for shape in ((1, HEADS), (2, 1)):
            for causal in (True, False):
                torch.manual_seed(4)
                bias = torch.randn(*shape, 8 * size, 8 * size)
                case = Case(size, rank, causal=causal, bias=bias)
                own = bias[:, :, case.mine].clone().requires_grad_()
                case.check(case.module(group, kind), what=kind, core_attention_bias_type="post_scale_bias", core_attention_bias=own)
                close(own.grad.double(), case.bias.grad[:, :, case.mine].double(), f"{kind}: the bias", 1e-5)


def case_alibi(ranks):
    for size, rank, group, kind in groups_of(ranks):
        if "p2p" in kind:
            continue
        whole = te.DotProductAttention(8, DIM, qkv_format="bshd", attn_mask_type="causal")
        case = Case(size, rank, heads=8, groups=8)
        wholes = [x.detach().clone().requires_grad_() for x in case.whole]
        want = whole(*wholes, core_attention_bias_type="alibi").view_as(wholes[0])
        want.backward(case.grad)
        inputs = case.inputs()
        out = case.module(group, kind)(*inputs, core_attention_bias_type="alibi").view_as(inputs[0])
        out.backward(case.own(case.grad))
        for got, expected in zip((out, *(x.grad for x in inputs)), (want, *(x.grad for x in wholes))):
            close(got, case.own(expected), kind, 1e-5)


def case_dropout(ranks):
    """A dropped probability is 0 in forward and backward: with values of ones the outputs are sums of kept probabilities, whose mean is 1, and their
    gradient by the value is the same sums."""
    for size, rank, group, kind in groups_of(ranks):
        case = Case(size, rank, heads=8, groups=8, causal=False)
        module = case.module(group, kind, attention_dropout=0.5)
        q, k, v = case.inputs()
        ones = torch.ones_like(v).requires_grad_()
        out = module(q, k, ones).view_as(v)
        assert 0.7 < out.mean().item() < 1.3 and out.std().item() > 0.05, (kind, out.mean(), out.std())
        out.backward(torch.ones_like(out))
        totals = torch.stack([out.detach().sum(), ones.grad.sum()])
        for one in group if isinstance(group, list) else [group]:
            torch.distributed.all_reduce(totals, group=one)
        close(totals[1], totals[0], f"{kind}: sums of the kept probabilities", 1e-4)
        assert torch.equal(module.eval()(q, k, ones).view_as(v).round(decimals=4), torch.ones_like(v)) or torch.is_grad_enabled()


def case_the_largest_score(ranks):
    for size, rank, group, kind in groups_of(ranks):
        case = Case(size, rank, heads=8, groups=4)
        _, largest = case.module(group, kind, return_max_logit=True)(*case.inputs())
        q, k = (x.detach().double().transpose(1, 2) for x in case.whole[:2])
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / DIM ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf)
        close(largest.double(), scores.amax(dim=(0, 2, 3)), kind, 1e-5)


def case_recomputed(ranks):
    for size, rank, group, kind in groups_of(ranks):
        case = Case(size, rank, heads=8, groups=4)
        case.check(case.module(group, kind), what=kind, checkpoint_core_attention=True)


def case_fp8(ranks):
    """FP8 attention over ranks against FP64, in a first step with the scale 1 and in a second with scales of the first. The scale of q, k and v is that
    of one rank. With p2p keys, values and their gradients travel as codes, one byte for each number."""
    for size, rank, group, kind in groups_of(ranks):
        for layout in ("bshd", "thd"):
            case = Case(size, rank, layout, dtype=torch.bfloat16, heads=8, groups=4, dim=16)
            module, recipe = case.module(group, kind), te.recipe.DelayedScaling(fp8_dpa=True, amax_history_len=4)
            one = te.DotProductAttention(8, 16, num_gqa_groups=4, qkv_format=layout, attn_mask_type="padding_causal" if layout == "thd" else "causal")
            for step in range(2):
                collectives.reset_counts()
                with te.autocast(recipe=recipe, amax_reduction_group=ranks.groups[size]):
                    inputs = case.inputs()
                    out = module(*inputs, **case.lengths()).view_as(inputs[0])
                out.backward(case.own(case.grad))
                for name, got, want in zip(("out", "dq", "dk", "dv"), (out, *(x.grad for x in inputs)), (case.want, *(x.grad for x in case.whole))):
                    want = case.own(want).double()
                    error = (got.double() - want).norm() / want.norm()
                    assert error < 0.16, f"FP8, {kind}, {layout}, step {step}, {name}: {error:.3g}"
                with te.autocast(recipe=recipe):
                    whole = [x.detach().clone().requires_grad_() for x in case.whole]
                    y = one(*whole, **case.lengths())
                y.backward(case.grad.view_as(y))
            if kind == "p2p" and size == 2 and layout == "bshd":
                sent, keys = collectives.counts()["send", "gloo"], sum(x.numel() for x in inputs[1:])
                half = [keys // 2, keys]
                assert sent.bytes == 2 * half[rank] + half[1 - rank] + 3 * 16, sent
            found, expected = (dict(m._fp8_state()) for m in (module, one))
            assert torch.equal(found["fp8.fwd.scale"][:1], expected["fp8.fwd.scale"][:1]), (kind, found, expected)
            assert torch.equal(found["fp8.bwd.scale"][:1], expected["fp8.bwd.scale"][:1]), (kind, found, expected)
            assert 0.5 < (found["fp8.bwd.scale"][2] / expected["fp8.bwd.scale"][2]).item() < 2, (kind, found, expected)


def case_layers(ranks):
    """MultiheadAttention and TransformerLayer on a rank's tokens, with RoPE: outputs and gradients are those of one rank."""
    for size, rank, group, kind in groups_of(ranks):
        for make in (lambda: te.TransformerLayer(32, 64, 8, num_gqa_groups=4, hidden_dropout=0, attention_dropout=0, device="cpu", attn_input_format="bshd"),
                     lambda: te.MultiheadAttention(32, 8, num_gqa_groups=4, attention_dropout=0, device="cpu", qkv_format="bshd", input_layernorm=True)):
            torch.manual_seed(6)
            whole, part = make(), make()
            part.load_state_dict(whole.state_dict())
            part.set_context_parallel_group(group, None, None, kind)
            angles = te.RotaryPositionEmbedding(4)(8 * size)
            mine = tokens_of([8 * size], rank, size)
            x, grad = torch.randn(2, 8 * size, 32), torch.randn(2, 8 * size, 32)
            all_x, own_x = x.clone().requires_grad_(), x[:, mine].clone().requires_grad_()
            want, got = whole(all_x, rotary_pos_emb=angles), part(own_x, rotary_pos_emb=angles)
            want.backward(grad)
            got.backward(grad[:, mine])
            close(got, want[:, mine], kind, 2e-5)
            close(own_x.grad, all_x.grad[:, mine], kind, 2e-5)
            for (name, p), q in zip(whole.named_parameters(), part.parameters()):
                found = q.grad.clone()
                for one in group if isinstance(group, list) else [group]:
                    torch.distributed.all_reduce(found, group=one)
                close(found, p.grad, f"{kind}: {name}", 2e-5)
