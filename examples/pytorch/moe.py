"""Trains a small GPT whose layers have mixtures of experts, with te_fl.pytorch, and prints the implementations that ran its ops.

usage: moe.py [--device DEVICE] [--recipe none|delayed|current|block] [--steps N] [--experts N] [--top-k N] [--balance loss|bias] [--text FILE]
  --device   default: cuda if there is a GPU, else cpu
  --recipe   FP8 recipe; none trains in BF16 (default: delayed)
  --balance  what keeps the loads of the experts even: an auxiliary loss, or a bias of the choice that is updated after each step (default: loss)
  --text     training text, read as bytes (default: Python's licence and the Zen of Python)
"""

import argparse
import pathlib
import time

import torch
from quickstart import RECIPES, default_text

import te_fl
import te_fl.pytorch as te


class Block(torch.nn.Module):
    """Attention and a mixture of experts, each behind a norm and beside a residual connection."""

    def __init__(self, hidden: int, heads: int, experts: int, top_k: int, balance: str, device: torch.device):
        super().__init__()
        common = {"params_dtype": torch.bfloat16, "device": device}
        self.attention = te.MultiheadAttention(hidden, heads, attention_dropout=0.0, input_layernorm=True, normalization="RMSNorm", bias=False,
                                               qkv_format="bshd", attn_mask_type="causal", **common)
        self.norm = te.RMSNorm(hidden, **common)
        balanced = {"aux_loss_coeff": 0.01} if balance == "loss" else {"score_function": "sigmoid", "expert_bias": True}
        self.mixture = te.MoELayer(hidden, hidden, experts, top_k, shared_ffn_hidden_size=hidden // 2, **balanced, **common)

    def forward(self, x: torch.Tensor):
        x = x + self.attention(x)
        y = self.mixture(self.norm(x))
        y, loss = y if isinstance(y, tuple) else (y, 0.0)  # a mixture with an auxiliary loss returns it
        return x + y, loss


class Gpt(torch.nn.Module):
    """A decoder over bytes."""

    def __init__(self, layers: int, hidden: int, length: int, device: torch.device, **block):
        super().__init__()
        self.tokens = torch.nn.Embedding(256, hidden, device=device, dtype=torch.bfloat16)
        self.positions = torch.nn.Embedding(length, hidden, device=device, dtype=torch.bfloat16)
        self.layers = torch.nn.ModuleList(Block(hidden, device=device, **block) for _ in range(layers))
        self.head = te.LayerNormLinear(hidden, 256, bias=False, params_dtype=torch.bfloat16, device=device)

    def forward(self, text: torch.Tensor):
        x, losses = self.tokens(text) + self.positions.weight[:text.shape[1]], 0.0
        for layer in self.layers:
            x, loss = layer(x)
            losses = losses + loss
        return self.head(x), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipe", default="delayed", choices=RECIPES)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--balance", default="loss", choices=("loss", "bias"))
    parser.add_argument("--text", type=pathlib.Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(1)
    text = torch.frombuffer(bytearray(options.text.read_bytes() if options.text else default_text()), dtype=torch.uint8).long().to(device)
    length, batch = 64, 16
    model = Gpt(2, 128, length, device, heads=4, experts=options.experts, top_k=options.top_k, balance=options.balance)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-3, master_weights=True)
    fp8 = RECIPES[options.recipe]
    te_fl.reset_usage()
    began, losses = time.time(), []
    for step in range(options.steps):
        starts = torch.randint(0, len(text) - length - 1, (batch, 1), device=device)
        window = text[starts + torch.arange(length + 1, device=device)]
        with te.autocast(enabled=fp8 is not None, recipe=fp8() if fp8 else None):
            logits, auxiliary = model(window[:, :-1])
        loss = te.parallel_cross_entropy(logits.float(), window[:, 1:].contiguous()).mean()
        optimizer.zero_grad(set_to_none=True)
        (loss + auxiliary).backward()
        optimizer.step()
        if options.balance == "bias":
            for layer in model.layers:
                layer.mixture.update_expert_bias()
        losses.append(loss.detach())
        if step % 30 == 0 or step + 1 == options.steps:
            print(f"step {step + 1:4d}  loss {float(torch.stack(losses[-30:]).mean()):.3f} nats a byte", flush=True)
    served = {}
    for row in te_fl.usage():
        served[row["impl_id"]] = served.get(row["impl_id"], 0) + row["calls"]
    print(f"{options.steps} steps on {device} with {options.recipe} scaling and {options.experts} experts in {time.time() - began:.1f} s; ops run by "
          + ", ".join(f"{impl} ({calls} calls)" for impl, calls in sorted(served.items(), key=lambda item: -item[1])))


if __name__ == "__main__":
    main()
