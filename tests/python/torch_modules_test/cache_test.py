"""Tests generation with InferenceParams (KV caches): token by token gives the results of whole sequences at once, and of FP64; a refused call leaves
the caches unchanged."""

import copy
import itertools
import unittest
from collections import OrderedDict

import numpy
import torch

from torch_oracle import DEVICES, randn, randomise

import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_fl.errors import Error, InvalidArgument, Unsupported
from te_fl.pytorch.modules.inference import NonPagedKVCacheManager

HIDDEN, HEADS, CHANNELS, LONGEST = 64, 4, 16, 32
F32 = {"cpu": 1e-5, "cuda": 1e-4}  # relative to the norm of the whole tensor
# Batches of (sequence, number of new tokens). They cover prompts, single tokens, ends of sequences, new and cached sequences in one pass and in
# another order, and several new tokens of a cached sequence.
BATCHES = ([(0, 5), (1, 3)], [(0, 1), (1, 1)], [(1, 1), ("b", 4), (2, 7)], [(2, 1), ("b", 1)], [(3, 8), (2, 2), ("b", 1)], [(3, 1)])


def make_params(device, layout="bshd", groups=2, paged=False, dtype=torch.float32, **more):
    pages = dict(is_paged=True, page_size=4, total_num_pages=24) if paged else {}
    return te.InferenceParams(3, LONGEST, groups, CHANNELS, dtype, qkv_format=layout, max_ctx_len=8, device=device, **pages, **more)


def packed(parts, layout):
    return torch.cat(parts) if layout == "thd" else torch.nn.utils.rnn.pad_sequence(parts, batch_first=layout == "bshd")


def unpacked(out, lengths, layout):
    if layout == "thd":
        return out.split(lengths)
    return [out[i, :n] if layout == "bshd" else out[:n, i] for i, n in enumerate(lengths)]


def passes(params, tokens, layout, batches=BATCHES):
    """Yields for each batch: the new tokens of tokens[sequence] in the layout, and a function that returns (output, its position in the sequence) of
    each sequence."""
    done = {}
    for batch in batches:
        params.pre_step(OrderedDict(batch))
        places = [(name, slice(done.get(name, 0), done.get(name, 0) + n)) for name, n in batch]
        done = {name: place.stop for name, place in places}
        yield (packed([tokens[name][place] for name, place in places], layout),
               lambda out: list(zip(unpacked(out, [n for _, n in batch], layout), places)))


class Caches(unittest.TestCase):
    def near(self, got, want, tolerance):
        self.assertLessEqual((got.double() - want.double()).norm().item(), tolerance * want.double().norm().item())

    def tokens(self, device, dtype, *shape):
        return {name: randn(20, *shape, seed=i, dtype=dtype, device=device) for i, name in enumerate((0, 1, 2, 3, "b"))}

    def check_layers(self, kind, device, layout, dtype, paged=False, rope=True, recipe=None, tolerance=None, **options):
        options.update(attention_dropout=0.0, params_dtype=dtype, num_gqa_groups=options.get("num_gqa_groups", 2), device=device, layer_number=1)
        if kind is te.TransformerLayer:
            made = [kind(HIDDEN, 96, HEADS, hidden_dropout=0.0, attn_input_format=form, **options).eval() for form in (layout, "bshd")]
        else:
            made = [kind(HIDDEN, HEADS, qkv_format=form, **options).eval() for form in (layout, "bshd")]
        made[0].load_state_dict(randomise(made[1]).state_dict())
        mask = "self_attn_mask_type" if kind is te.TransformerLayer else "attn_mask_type"
        angles = te.RotaryPositionEmbedding(CHANNELS)(LONGEST).to(device) if rope else None
        tokens = self.tokens(device, dtype, HIDDEN)
        params = make_params(device, layout, options["num_gqa_groups"], paged, dtype)
        with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
            whole = {name: made[1](x[None], rotary_pos_emb=angles, **{mask: "causal"})[0] for name, x in tokens.items()}
            for x, of in passes(params, tokens, layout):
                for got, (name, place) in of(made[0](x, rotary_pos_emb=angles, inference_params=params, **{mask: "padding_causal"})):
                    self.near(got, whole[name][place], tolerance or (2e-2 if dtype == torch.bfloat16 else F32[device]))

    def test_layers(self):
        for device, layout, paged, kind in itertools.product(DEVICES, ("bshd", "sbhd", "thd"), (False, True), (te.MultiheadAttention, te.TransformerLayer)):
            for dtype, rope in ((torch.float32, False), (torch.bfloat16, True)):
                with self.subTest(device=device, layout=layout, paged=paged, kind=kind.__name__, dtype=dtype):
                    self.check_layers(kind, device, layout, dtype, paged, rope)
        for options in (dict(window_size=(4, 0)), dict(qk_norm_type="RMSNorm"), dict(num_gqa_groups=4, rotary_pos_interleaved=True),
                        dict(softcap=2.0), dict(softmax_type="learnable")):
            with self.subTest(**options):
                self.check_layers(te.MultiheadAttention, DEVICES[-1], "bshd", torch.float32, **options)

    def test_layers_in_fp8(self):
        for recipe, layout in itertools.product((DelayedScaling(), Float8CurrentScaling(), Float8BlockScaling()), ("bshd", "thd")):
            with self.subTest(recipe=type(recipe).__name__, layout=layout):
                self.check_layers(te.TransformerLayer, DEVICES[-1], layout, torch.bfloat16, recipe=recipe, tolerance=0.08)

    def test_attention_in_fp64(self):
        """The oracle has no cache, no layout and no batch: it computes each sequence alone, over all of its tokens."""
        for device, layout, paged in itertools.product(DEVICES, ("bshd", "sbhd", "thd"), (False, True)):
            for mask, size in (("padding_causal", None), ("padding_causal_bottom_right", (3, 0)), ("padding", None), ("padding", (2, 1))):
                with self.subTest(device=device, layout=layout, paged=paged, mask=mask, size=size):
                    self.check_attention(device, layout, paged, mask, size)

    def check_attention(self, device, layout, paged, mask, size):
        module = te.DotProductAttention(HEADS, CHANNELS, 2, qkv_format=layout, attn_mask_type=mask, window_size=size, layer_number=7)
        heads = [(HEADS, CHANNELS), (2, CHANNELS), (2, CHANNELS)]
        tokens = self.tokens(device, torch.float32, sum(h for h, _ in heads), CHANNELS)
        params = make_params(device, layout, paged=paged)
        for x, of in passes(params, tokens, layout):
            out = module(*x.split([h for h, _ in heads], -2), inference_params=params)
            for got, (name, place) in of(out):
                q, k, v = (t.double() for t in tokens[name][:place.stop].split([h for h, _ in heads], -2))
                k, v = (t.repeat_interleave(2, 1) for t in (k, v))
                scores = torch.einsum("qhd,khd->hqk", q[place], k) / CHANNELS ** 0.5
                behind = torch.arange(place.stop, device=device) - torch.arange(place.start, place.stop, device=device)[:, None]
                left, right = (-1, -1) if size is None else size
                hidden = (behind > 0) & ("causal" in mask) | (behind < -left) & (left >= 0) | (behind > right) & (right >= 0)
                want = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
                self.near(got, want.flatten(-2), F32[device])

    def test_a_model_generates_what_it_would_without_a_cache(self):
        """Two layers share one cache; prompts have different lengths, and one sequence ends early. Runs in inference mode with caches made before
        it."""
        device = DEVICES[-1]
        layers = [randomise(te.TransformerLayer(HIDDEN, 96, HEADS, num_gqa_groups=2, layer_number=i + 1, attn_input_format="bshd", device=device,
                                                hidden_dropout=0.0, attention_dropout=0.0)).eval() for i in range(2)]
        words = randn(50, HIDDEN, seed=9, device=device)
        angles = te.RotaryPositionEmbedding(CHANNELS)(LONGEST).to(device)

        def next_words(x, **how):
            for layer in layers:
                x = layer(x, rotary_pos_emb=angles, **how)
            return (x @ words.T).argmax(-1)

        prompts = {0: [3, 1, 4, 1, 5], 1: [9, 2], 2: [6]}
        params = make_params(device)
        params.allocate_memory(1)
        with torch.inference_mode():
            texts = {name: list(prompt) for name, prompt in prompts.items()}
            new = {name: list(prompt) for name, prompt in prompts.items()}
            for step in range(6):
                if step == 3:
                    del new[1]
                params.pre_step(OrderedDict((name, len(those)) for name, those in new.items()))
                out = next_words(words[packed([torch.tensor(those, device=device) for those in new.values()], "bshd")],
                                 self_attn_mask_type="padding_causal", inference_params=params, cu_seqlens_q=params.cu_seqlens_q,
                                 cu_seqlens_kv=params.cu_seqlens_kv)
                new = {name: [out[i, len(those) - 1].item()] for i, (name, those) in enumerate(new.items())}
                for name, those in new.items():
                    texts[name] += those
            for name, those in texts.items():
                alone = list(prompts[name])
                while len(alone) < len(those):
                    alone.append(next_words(words[torch.tensor([alone], device=device)], self_attn_mask_type="causal")[0, -1].item())
                self.assertEqual(those, alone)

    def test_a_pass_that_is_repeated(self):
        """A repeated pass writes to the same positions, as a recomputed forward or the warm-up passes of a CUDA graph do."""
        module = te.DotProductAttention(HEADS, CHANNELS, qkv_format="bshd", layer_number=1)
        params, q = make_params("cpu", groups=HEADS), randn(2, 3, HEADS, CHANNELS)
        for steps in ({0: 3, 1: 2}, {1: 1, 0: 1}):
            params.pre_step(steps)
            first, again = (module(q, q, q, attn_mask_type="padding_causal", inference_params=params) for _ in range(2))
            for i, n in enumerate(steps.values()):
                self.assertTrue(torch.equal(first[i, :n], again[i, :n]))

    def test_biases(self):
        """Tests ALiBi, and a bias of the scores with a column for each position of the cache."""
        q, k, v, bias = randn(1, 12, HEADS, CHANNELS), randn(1, 12, 2, CHANNELS, seed=2), randn(1, 12, 2, CHANNELS, seed=3), randn(1, HEADS, 12, LONGEST, seed=4)
        for kind, softmax in itertools.product(("alibi", "post_scale_bias", "pre_scale_bias"), ("vanilla", "off-by-one")):
            module = te.DotProductAttention(HEADS, CHANNELS, 2, qkv_format="bshd", layer_number=1, softmax_type=softmax)
            of = (lambda queries, keys: {} if kind == "alibi" else {"core_attention_bias": bias[:, :, queries, :keys].contiguous()})
            want = module(q, k, v, attn_mask_type="causal", core_attention_bias_type=kind, **of(slice(0, 12), 12))
            params, at = make_params("cpu"), 0
            for new in (5, 1, 3):
                params.pre_step({0: new})
                own = slice(at, at + new)
                got = module(q[:, own], k[:, own], v[:, own], attn_mask_type="padding_causal", inference_params=params, core_attention_bias_type=kind,
                             **of(own, LONGEST))
                self.near(got, want[:, own], 1e-5)
                at += new

    def test_padding_past_the_angles(self):
        """A sequence may end at the last RoPE angle, even if padding to a longer sequence of the same pass extends it past the table of angles."""
        module = randomise(te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, qkv_format="bshd", device="cpu")).eval()
        angles = te.RotaryPositionEmbedding(CHANNELS)(10).cpu()
        x = randn(10, HIDDEN)
        params = make_params("cpu", groups=HEADS)
        with torch.no_grad():
            whole = module(x[None], attn_mask_type="causal", rotary_pos_emb=angles)[0]
            params.pre_step({0: 8})
            module(x[None, :8], attn_mask_type="padding_causal", inference_params=params, rotary_pos_emb=angles)
            params.pre_step({0: 2, 1: 6})
            out = module(packed([x[8:], x[:6]], "bshd"), attn_mask_type="padding_causal", inference_params=params, rotary_pos_emb=angles)
            self.near(out[0, :2], whole[8:], 1e-5)
            self.near(out[1, :6], whole[:6], 1e-5)
            params.pre_step({0: 1})
            with self.assertRaisesRegex(ValueError, "rotary_pos_emb has 10 positions.* 11 tokens"):
                module(x[None, :1], attn_mask_type="padding_causal", inference_params=params, rotary_pos_emb=angles)

    def test_gradients_are_refused(self):
        module = te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, qkv_format="bshd", device="cpu")
        params = make_params("cpu", groups=HEADS)
        params.pre_step({0: 3})
        out = module(randn(1, 3, HIDDEN), attn_mask_type="padding_causal", inference_params=params)
        with self.assertRaisesRegex(Unsupported, "inference_params has no gradient"):
            out.sum().backward()

    def test_a_manager_of_ones_own(self):
        class Manager(NonPagedKVCacheManager):
            def step(self, layer_number, new_k, *rest):
                seen.append((layer_number, new_k.shape[0]))
                return super().step(layer_number, new_k, *rest)

        seen = []
        module = te.DotProductAttention(HEADS, CHANNELS, qkv_format="bshd", layer_number=3)
        params, q = make_params("cpu", groups=HEADS, custom_cache_manager=Manager), randn(1, 2, HEADS, CHANNELS)
        params.pre_step({"x": 2})
        module(q, q, q, attn_mask_type="padding_causal", inference_params=params)
        self.assertEqual(seen, [(3, 1)])
        self.assertTrue(torch.equal(params.cache_manager.cache[3][0][0, :2], q[0]))

    def test_pages_are_given_back(self):
        params = make_params("cpu", paged=True)
        for steps, free in (({0: 8, 1: 5}, 20), ({0: 1, 1: 1}, 19), ({1: 1, 2: 4}, 21), ({1: 1}, 22)):
            params.pre_step(steps)
            self.assertEqual(len(params.cache_manager.free_pages), free)
            used = [page for pages in params.cache_manager.allocated_pages.values() for page in pages]
            self.assertEqual(sorted(used + params.cache_manager.free_pages), list(range(24)))
        params.reset()
        self.assertEqual(len(params.cache_manager.free_pages), 24)


class Refusals(unittest.TestCase):
    def setUp(self):
        self.module = te.DotProductAttention(HEADS, CHANNELS, 2, qkv_format="bshd", attn_mask_type="padding_causal", layer_number=1)

    def call(self, params, batch=2, tokens=1, q=None, k=None, module=None, **how):
        q = randn(batch, tokens, HEADS, CHANNELS) if q is None else q
        k = randn(batch, tokens, 2, CHANNELS) if k is None else k
        return (module or self.module)(q, k, k, inference_params=params, **how)

    def test_what_is_refused_has_changed_nothing(self):
        for paged in (False, True):
            params = make_params("cpu", paged=paged)
            params.pre_step({0: 8, 1: 6})
            self.call(params, tokens=8)
            params.pre_step({0: 1, 1: 1})
            other = te.DotProductAttention(HEADS, CHANNELS, 2, qkv_format="bshd", layer_number=1)
            cases = (
                ("7 has 0 tokens and gets 33 more; max_sequence_length is 32", lambda: params.pre_step({0: 1, 7: 33})),
                ("gets 9 tokens; max_ctx_len is 8", lambda: params.pre_step({0: 9})),
                ("1 to max_batch_size, 3,", lambda: params.pre_step({i: 1 for i in range(4)})),
                ("1 to max_batch_size, 3,", lambda: params.pre_step({})),
                ("sequence 1 has 0 new tokens", lambda: params.pre_step({0: 1, 1: 0})),
                ("new_k is torch.bfloat16.*caches are torch.float32", lambda: self.call(params, k=randn(2, 1, 2, CHANNELS, dtype=torch.bfloat16))),
                (r"new_k has shape \(2, 1, 4, 16\)", lambda: self.call(params, k=randn(2, 1, 4, CHANNELS))),
                (r"new_k has shape \(3, 1, 2, 16\)", lambda: self.call(params, batch=3)),
                (r"new_k has shape \(1, 1, 2, 16\)", lambda: self.call(params, batch=1)),
                ("queries have shape", lambda: self.call(params, q=randn(2, 2, HEADS, CHANNELS))),
                ("two layers have the layer_number 1", lambda: self.call(params, module=other, attn_mask_type="padding_causal")),
                ("attn_mask_type is 'causal' with inference_params", lambda: self.call(params, attn_mask_type="causal")),
                ("attention_mask is given", lambda: self.call(params, attention_mask=torch.zeros(2, 1, 1, 1, dtype=torch.bool))),
                (r"cu_seqlens_q is \[0, 2, 3\]", lambda: self.call(params, cu_seqlens_q=torch.tensor([0, 2, 3], dtype=torch.int32))),
                ("cu_seqlens_kv is", lambda: self.call(params, cu_seqlens_kv=torch.tensor([0, 8, 14], dtype=torch.int32))),
                ("max_seqlen_q is 0", lambda: self.call(params, max_seqlen_q=0)),
                ("cu_seqlens_q_padded is given", lambda: self.call(params, cu_seqlens_q_padded=params.cu_seqlens_q)),
            )
            for message, call in cases:
                with self.subTest(paged=paged, message=message):
                    before = self.state(params)
                    with self.assertRaisesRegex((Error, ValueError), message):
                        call()
                    self.same(before, self.state(params))
            for steps in ({0: 8}, {0: 8}, {0: 7}):
                params.pre_step(steps)
            with self.assertRaisesRegex(ValueError, "sequence 0 has 32 tokens and gets 1 more; max_sequence_length is 32"):
                params.pre_step({0: 1})

    def test_a_refused_call_takes_no_place(self):
        params, right = make_params("cpu"), te.DotProductAttention(HEADS, CHANNELS, 2, qkv_format="bshd", attn_mask_type="padding_causal", layer_number=1)
        params.pre_step({0: 1, 1: 1})
        with self.assertRaisesRegex(InvalidArgument, "new_k has shape"):
            self.call(params, batch=1)
        self.call(params, module=right)

    def test_a_copy_of_the_model_goes_on_with_a_copy_of_the_cache(self):
        params = make_params("cpu")
        params.pre_step({0: 2, 1: 2})
        self.call(params, tokens=2)
        module, copied = copy.deepcopy((self.module, params))
        for one in (params, copied):
            one.pre_step({0: 1, 1: 1})
        q, k = randn(2, 1, HEADS, CHANNELS), randn(2, 1, 2, CHANNELS)
        self.assertTrue(torch.equal(self.call(params, q=q, k=k), self.call(copied, q=q, k=k, module=module)))

    def test_counts_of_other_libraries(self):
        params = te.InferenceParams(numpy.int64(3), 8, 2, CHANNELS, torch.float32, device="cpu")
        params.pre_step({0: numpy.int64(2), 1: torch.tensor(3)})
        self.assertEqual(dict(params.sequences), {0: 2, 1: 3})

    def state(self, params):
        manager = params.cache_manager
        tensors = [*manager.cache[1], params.cu_seqlens_q, params.cu_seqlens_kv, params.pre_step_seqlens, getattr(manager, "page_table", torch.empty(0))]
        return [t.clone() for t in tensors], dict(params.sequences), params.batch_size, list(getattr(manager, "free_pages", []))

    def same(self, before, after):
        self.assertEqual(before[1:], after[1:])
        for was, now in zip(before[0], after[0]):
            self.assertTrue(torch.equal(was, now))

    def test_calls_without_a_batch_and_of_others(self):
        params = make_params("cpu")
        with self.assertRaisesRegex(Error, "call its pre_step"):
            self.call(params)
        params.pre_step({0: 1})
        with self.assertRaisesRegex(ValueError, "layer_number is None"):
            self.call(params, 1, module=te.DotProductAttention(HEADS, CHANNELS, 2, qkv_format="bshd"), attn_mask_type="padding_causal")
        decoder = te.TransformerLayer(HIDDEN, HIDDEN, HEADS, layer_type="decoder", device="cpu")
        x = randn(1, 1, HIDDEN)
        for call in (lambda: self.call(object(), 1), lambda: decoder(x, encoder_output=x, inference_params=params),
                     lambda: te.MultiheadAttention(HIDDEN, HEADS, attention_type="cross", device="cpu")(x, encoder_output=x, inference_params=params)):
            with self.assertRaisesRegex(Unsupported, "inference_params"):
                call()
        with te.autocast(recipe=DelayedScaling(fp8_dpa=True)), self.assertRaisesRegex(Unsupported, "inference_params.*fp8_dpa"):
            self.call(params, 1)

    def test_graphs_of_torch_compile_hold_no_caches(self):
        params, q, k = make_params("cpu"), randn(1, 1, HEADS, CHANNELS), randn(1, 1, 2, CHANNELS)
        params.pre_step({0: 1})

        def call(q, k):
            return self.module(q, k, k, inference_params=params) * 2

        with self.assertRaisesRegex(Exception, "inference_params.*torch.compile hold no caches"):
            torch.compile(call, fullgraph=True, backend="eager")(q, k)
        self.assertTrue(torch.equal(torch.compile(call, backend="eager")(q, k), call(q, k)))

    def test_arguments(self):
        for message, options in (("num_heads_kv is None", dict(num_heads_kv=None)), ("dtype = None", dict(dtype=None)), ("max_batch_size is 0", dict(max_batch_size=0)),
                                 ("dtype = torch.int8", dict(dtype=torch.int8)), ("max_ctx_len is None", dict(qkv_format="thd")),
                                 ("max_ctx_len is 9", dict(max_ctx_len=9)), ("qkv_format is 'bhsd'", dict(qkv_format="bhsd")),
                                 ("page_size is 3", dict(is_paged=True, page_size=3, total_num_pages=4)), ("total_num_pages is 3; it is .*, 4", dict(
                                     is_paged=True, page_size=4, total_num_pages=3)), ("is_paged=False", dict(page_size=4)),
                                 ("custom_cache_manager", dict(custom_cache_manager=object())), ("has no argument 'max_seqlen'", dict(max_seqlen=8))):
            with self.subTest(message=message), self.assertRaisesRegex((ValueError, TypeError, Unsupported), message):
                te.InferenceParams(**{**dict(max_batch_size=2, max_sequence_length=8, num_heads_kv=2, head_dim_k=8, dtype=torch.float32), **options})


if __name__ == "__main__":
    unittest.main()
