"""Trains a small GPT in FP8 with te_fl.pytorch and prints the implementations that ran its ops.

usage: quickstart.py [--device DEVICE] [--recipe none|delayed|current|block] [--steps N] [--text FILE]
  --device  default: cuda if there is a GPU, else cpu
  --recipe  FP8 recipe; none trains in FP32 on the CPU and in BF16 on a GPU (default: delayed)
  --text    training text, read as bytes (default: Python's licence and the Zen of Python)
"""

import argparse
import codecs
import contextlib
import io
import pathlib
import time

import torch

import te_fl
import te_fl.pytorch as te
from te_fl.common import recipe

RECIPES = {"none": None, "delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling, "block": recipe.Float8BlockScaling}


class Gpt(torch.nn.Module):
    """A decoder over bytes: embeddings, Transformer layers, a normalisation and the logits."""

    def __init__(self, layers: int, hidden: int, heads: int, length: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.tokens = torch.nn.Embedding(256, hidden, device=device, dtype=dtype)
        self.positions = torch.nn.Embedding(length, hidden, device=device, dtype=dtype)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(hidden, 4 * hidden, heads, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype, device=device,
                                attn_input_format="bshd", layer_number=i + 1) for i in range(layers))
        self.head = te.LayerNormLinear(hidden, 256, bias=False, params_dtype=dtype, device=device)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.positions.weight[:text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def default_text() -> bytes:
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    zen = codecs.decode(this.s, "rot13")
    licence = pathlib.Path(io.__file__).parent / "LICENSE.txt"
    return (licence.read_text(errors="replace") if licence.exists() else zen * 20).encode() + zen.encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipe", default="delayed", choices=RECIPES)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--text", type=pathlib.Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(1)
    text = torch.frombuffer(bytearray(options.text.read_bytes() if options.text else default_text()), dtype=torch.uint8).long().to(device)
    length, batch = 64, 16
    model = Gpt(layers=2, hidden=128, heads=4, length=length, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16, device=device)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=3e-3)
    fp8 = RECIPES[options.recipe]
    te_fl.reset_usage()
    began, losses = time.time(), []
    for step in range(options.steps):
        starts = torch.randint(0, len(text) - length - 1, (batch, 1), device=device)
        window = text[starts + torch.arange(length + 1, device=device)]
        with te.autocast(enabled=fp8 is not None, recipe=fp8() if fp8 else None):
            logits = model(window[:, :-1])
        loss = te.parallel_cross_entropy(logits.float(), window[:, 1:].contiguous()).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % 30 == 0 or step + 1 == options.steps:
            print(f"step {step + 1:4d}  loss {float(torch.stack(losses[-30:]).mean()):.3f} nats a byte", flush=True)
    served = {}
    for row in te_fl.usage():
        served[row["impl_id"]] = served.get(row["impl_id"], 0) + row["calls"]
    print(f"{options.steps} steps on {device} with {options.recipe} scaling in {time.time() - began:.1f} s; ops run by "
          + ", ".join(f"{impl} ({calls} calls)" for impl, calls in sorted(served.items(), key=lambda item: -item[1])))


if __name__ == "__main__":
    main()
