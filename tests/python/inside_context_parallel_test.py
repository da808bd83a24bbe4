"""Tests NVIDIA's context parallelism on te-fl with two processes over Gloo: ring attention, all-gathered keys and exchanged heads, in every format,
also with padding between sequences, with and without a causal mask. Compares each rank's output and gradients with those of the whole sequence in
FP64; padding yields zeros."""

import os
import subprocess
import sys
import tempfile
import unittest

from forkserver import PYTHON

RANKS, HEADS, GROUPS, DIM = 2, 4, 2, 16


def exact(torch, q, k, v, causal, window=None):
    """Attention for [B, S, H, D] in FP64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    shown = None
    if window is not None:
        behind = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
        shown = (behind >= -window[0]) & (behind <= window[1])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, shown, is_causal=causal).transpose(1, 2)


def rank_tokens(torch, lengths, rank):
    """Returns the indices of a rank's tokens: chunks rank and 2 RANKS - 1 - rank of the 2 RANKS chunks of each sequence."""
    numbers, begin = [], 0
    for n in lengths:
        chunk = n // (2 * RANKS)
        for c in (rank, 2 * RANKS - 1 - rank):
            numbers += range(begin + c * chunk, begin + (c + 1) * chunk)
        begin += n
    return torch.tensor(numbers)


def run_case(torch, te, group, rank, kind, form, causal, window=None):
    """Returns the relative errors of the output and of the gradients of q, k and v."""
    torch.manual_seed(0)
    thd, padded = form.startswith("thd"), form == "thd padded"
    mask = (("padding", "padding_causal") if thd else ("no_mask", "causal"))[causal]
    attention = te.DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format=form.split()[0], attn_mask_type=mask, window_size=window,
                                       cp_group=group, cp_global_ranks=list(range(RANKS)), cp_stream=torch.cuda.Stream(), cp_comm_type=kind)
    lengths, tokens = [8, 16, 8] if thd else [16], [5, 9, 1] if padded else [8, 16, 8]
    places = (sum(lengths),) if thd else (2, 16)
    whole = [torch.randn(*places, heads, DIM).bfloat16().requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    grad = torch.randn(*places, HEADS, DIM).bfloat16()
    mine = rank_tokens(torch, lengths, rank)
    if thd:
        want = torch.cat([torch.nn.functional.pad(exact(torch, *(x[:n].unsqueeze(0) for x in parts), causal)[0], (0, 0, 0, 0, 0, len(parts[0]) - n))
                          for n, parts in zip(tokens, zip(*(x.split(lengths) for x in whole)))])
        own = lambda x: x[mine]  # noqa: E731
        cu, cu_padded = (torch.tensor([0, *n]).cumsum(0, dtype=torch.int32) for n in (tokens, lengths))
        options = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu_padded, cu_seqlens_kv_padded=cu_padded, max_seqlen_q=16,
                       max_seqlen_kv=16, pad_between_seqs=padded)
    else:
        want, options = exact(torch, *whole, causal, window), {}
        own = (lambda x: x[:, mine].transpose(0, 1).contiguous()) if form == "sbhd" else (lambda x: x[:, mine])  # noqa: E731
    want.backward(grad.double())
    local = [own(x.detach()).clone().requires_grad_() for x in whole]
    out = attention(*local, **options).view(local[0].shape)
    out.backward(own(grad))
    pairs = [(out, own(want)), *((x.grad, own(w.grad)) for x, w in zip(local, whole))]
    return [((got.double() - expected.double()).norm() / expected.double().norm()).item() for got, expected in pairs]


def work(rank, store):
    import inside_package  # noqa: F401
    import te_fl
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as dpa
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{store}")
    group = torch.distributed.new_group(list(range(RANKS)))
    for kind in ("p2p", "all_gather", "a2a"):
        for form in ("bshd", "sbhd", "thd", "thd padded"):
            for causal in (False, True):
                dpa._attention_backends["backend_selection_requires_update"] = True
                errors = run_case(torch, te, group, rank, kind, form, causal)
                assert dpa._attention_backends["use_fused_attention"], (kind, form, causal)
                assert all(error < 8e-3 for error in errors), (kind, form, causal, errors)
    for kind, supported in (("all_gather", False), ("a2a", True)):
        for window in ((4, 4), (4, 0)):
            dpa._attention_backends["backend_selection_requires_update"] = True
            try:
                errors = run_case(torch, te, group, rank, kind, "bshd", False, window)
                assert supported and all(error < 8e-3 for error in errors), (kind, window, errors)
            except te_fl.Error as error:  # raised on every rank, so that no rank waits for another
                assert not supported and f"window_size = {window} with attn_mask_type 'no_mask' and cp_comm_type 'all_gather'" in str(error), (kind, error)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    print("24 cases")


class ContextParallel(unittest.TestCase):
    def test_two_ranks(self):
        import inside_package  # noqa: F401 skips where the package is not installed
        with tempfile.TemporaryDirectory() as folder:
            begun = [subprocess.Popen([*PYTHON, os.path.abspath(__file__), str(rank), os.path.join(folder, "store")], text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(RANKS)]
            try:
                for process in begun:
                    out, err = process.communicate(timeout=900)
                    self.assertEqual(process.returncode, 0, err)
                    self.assertIn("24 cases", out)
            finally:
                for process in begun:
                    process.kill()


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        work(int(sys.argv[1]), sys.argv[2])
    else:
        unittest.main()
