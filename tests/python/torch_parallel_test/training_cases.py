"""Cases that train a small GPT over a group: its losses equal those of one rank, in F32 and in FP8, and are reproducible."""

import torch

import te_fl.pytorch as te
from common import randomise, share
from te_fl.common.recipe import DelayedScaling, Float8CurrentScaling
from te_fl.pytorch.distributed import collectives

VOCABULARY, HIDDEN, LENGTH, BATCH, STEPS = 32, 32, 16, 4, 50


class Gpt(torch.nn.Module):
    """Embeddings, layers, a norm and logits. With sequence_parallel everything except the embeddings works on this rank's part of the sequence."""

    def __init__(self, **parallel):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.places = torch.nn.Embedding(LENGTH, HIDDEN)
        self.layers = torch.nn.ModuleList(te.TransformerLayer(HIDDEN, 64, 4, hidden_dropout=0, attention_dropout=0, fuse_qkv_params=True, device="cpu",
                                                              set_parallel_mode=True, **parallel) for _ in range(2))
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.group = parallel.get("tp_group")
        self.divided = self.group is not None and parallel["sequence_parallel"]
        if self.divided:
            for module in (self.tokens, self.places, self.norm, self.head):
                for p in module.parameters():
                    p.sequence_parallel = True

    def own(self, t):
        return t.chunk(self.group.size())[self.group.rank()] if self.divided else t

    def forward(self, tokens, targets):
        """Computes this rank's summand of the loss; tokens and targets are [length, batch]."""
        x = self.own(self.tokens(tokens) + self.places.weight[:, None])
        for layer in self.layers:
            x = layer(x)
        loss = torch.nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), self.own(targets).flatten())
        return loss / (self.group.size() if self.divided else 1)


def trained(model, recipe=None, steps=STEPS):
    """Trains on a sequence that a model can learn; returns the losses."""
    generator = torch.Generator().manual_seed(3)
    optimizer, losses = torch.optim.Adam(model.parameters(), 3e-3), []
    for _ in range(steps):
        begin = torch.randint(VOCABULARY, (1, BATCH), generator=generator)
        text = (begin + 3 * torch.arange(LENGTH + 1)[:, None]) % VOCABULARY
        optimizer.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=model.group):
            loss = model(text[:-1], text[1:])
        loss.backward()
        whole = loss.detach().clone()
        if model.divided:
            collectives.all_reduce(whole, model.group)
            for p in model.parameters():
                if getattr(p, "sequence_parallel", False):
                    collectives.all_reduce(p.grad, model.group)
        optimizer.step()
        losses.append(whole.item())
    return losses


def pair(group, sp):
    torch.manual_seed(5)
    whole = Gpt()
    return whole, share(whole, Gpt(tp_group=group, sequence_parallel=sp), group.size(), group.rank())


def off(got, want):
    return max(abs(a - b) / b for a, b in zip(got, want))


def case_losses_in_f32(ranks):
    for size in ranks.degrees():
        for sp in (False, True):
            whole, part = pair(ranks.groups[size], sp)
            want, got = trained(whole), trained(part)
            assert want[-1] < 0.5 * want[0], want
            assert off(got, want) <= 1e-4, (size, sp, off(got, want))
            again = trained(pair(ranks.groups[size], sp)[1])
            assert again == got, "the same degree twice"


def scales(module):
    return {f"{name}.{key}": value for name, part in module.named_modules() if hasattr(part, "_fp8_state") for key, value in part._fp8_state()
            if key.endswith("scale")}


def case_losses_in_fp8(ranks):
    for size in ranks.degrees():
        group = ranks.groups[size]
        for recipe in (DelayedScaling(), Float8CurrentScaling()):
            for sp in (False, True):
                whole, part = pair(group, sp)
                want, got = trained(whole, recipe), trained(part, recipe)
                assert off(got, want) <= 5e-3, (size, sp, type(recipe).__name__, off(got, want))
                again = trained(pair(group, sp)[1], recipe)
                assert again == got, "the same degree twice"
                if isinstance(recipe, DelayedScaling):
                    own = scales(part)
                    assert own
                    for name, scale in own.items():
                        everybody = scale.new_empty(size * scale.numel())
                        collectives.all_gather_into(everybody, scale.flatten().contiguous(), group)
                        assert torch.equal(everybody.view(size, -1), scale.flatten().expand(size, -1)), name


def case_one_reduction_of_amaxes_in_each_direction(ranks):
    from unittest import mock

    import torch.distributed as dist
    for size in ranks.degrees():
        group = ranks.groups[size]
        _, part = pair(group, True)
        text = torch.zeros(LENGTH, BATCH, dtype=torch.long)
        largest = []

        def counted(tensor, op=dist.ReduceOp.SUM, *rest, **more):
            if op == dist.ReduceOp.MAX:
                largest.append(tensor.numel())
            return all_reduce(tensor, op, *rest, **more)
        all_reduce = dist.all_reduce
        with mock.patch.object(dist, "all_reduce", counted):
            with te.autocast(recipe=DelayedScaling(), amax_reduction_group=group):
                loss = part(text, text)
            assert len(largest) == 1, largest
            loss.backward()
            assert len(largest) == 2, largest
            with te.autocast(recipe=Float8CurrentScaling()):
                part(text, text).backward()
            # Under current scaling the ranks reduce one amax for each input of a column-parallel Linear and each output gradient of a row-parallel
            # one, in two layers.
            assert largest[2:] == [1] * 8, largest


def case_a_gathered_input_is_quantised_as_the_whole(ranks):
    """Under current scaling a gathered input is quantised with the scale of all rows, although a rank's own amax is smaller."""
    for size in ranks.degrees():
        group = ranks.groups[size]
        rank = group.rank()
        whole = randomise(te.Linear(32, 32, device="cpu"))
        part = share(whole, te.Linear(32, 32, parallel_mode="column", tp_group=group, sequence_parallel=True, device="cpu"), size, rank)
        x = torch.randn(16, 32)
        x[:16 // size] *= 100
        with te.autocast(recipe=Float8CurrentScaling()):
            # The weight's scale comes from the rank's own rows, as in Transformer Engine; one large row in each shard makes the scales equal.
            for module in (whole, part):
                module.weight.data[::32 // size] = 3
            want, got = whole(x), part(x.chunk(size)[rank])
        assert torch.equal(got, want.chunk(size, -1)[rank])
