#!/usr/bin/env python3
"""A GPT of megatron-core with its Transformer Engine specification, on one GPU: with te_fl under Transformer Engine's names, with NVIDIA's package on
te-fl, and with NVIDIA's package on its own extension. Losses of the same batches, and milliseconds a step.

usage: megatron_step.py [--extension FOLDER] [--steps N] [--experts N] [--json FILE]
  --extension  a folder with transformer_engine and its compiled libraries, for the peer's process (default: where Python finds them)
  --experts    experts of each layer's mixture, top 2; 0: a dense MLP (default 0)

Two layers of hidden size 1024, 2 x 512 tokens, BF16 and FP8 by delayed scaling. Needs megatron-core, te_fl on PYTHONPATH and
TE_FL_PLUGIN_MODULES naming the CUDA plugin of a build.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

WAYS = ("names", "inside", "extension")


def train(way, fp8, steps, experts, store):
    import warnings
    warnings.simplefilter("ignore")
    import te_fl
    if way == "names":
        te_fl.as_transformer_engine()
    elif way == "inside":
        te_fl.inside_transformer_engine()
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(123)
    options = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"} if fp8 else {}
    if experts:
        options.update(num_moe_experts=experts, moe_router_topk=2, moe_grouped_gemm=True, moe_aux_loss_coeff=0.01, moe_permute_fusion=False,
                       add_bias_linear=False, moe_ffn_hidden_size=1024)
    config = TransformerConfig(num_layers=2, hidden_size=1024, num_attention_heads=16, ffn_hidden_size=4096, hidden_dropout=0.0, attention_dropout=0.0,
                               use_cpu_initialization=True, params_dtype=torch.bfloat16, bf16=True, pipeline_dtype=torch.bfloat16,
                               gradient_accumulation_fusion=False, **options)
    torch.manual_seed(1)
    model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(num_experts=experts or None, moe_grouped_gemm=bool(experts)),
                     vocab_size=512, max_sequence_length=512, position_embedding_type="learned_absolute").cuda().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)
    generator = torch.Generator().manual_seed(0)
    texts = [((torch.randint(512, (2, 1), generator=generator) + 3 * torch.arange(513)) % 512).cuda() for _ in range(steps)]
    places, losses = torch.arange(512, device="cuda").repeat(2, 1), []

    def step(text):
        optimizer.zero_grad()
        loss = model(text[:, :-1], places, None, labels=text[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()
    for text in texts:
        losses.append(step(text))
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for text in texts[:10]:
            model.zero_grad()
            model(text[:, :-1], places, None, labels=text[:, 1:]).mean().backward()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 10 * 1e3)
    print("RESULT " + json.dumps({"losses": [float(x) for x in losses], "ms": sorted(times)[2],
                                  "served": sorted({u["impl_id"] for u in te_fl.usage()})}))
    dist.destroy_process_group()


def child(way, fp8, options):
    environment = dict(os.environ)
    if way == "extension" and options.extension:
        environment["PYTHONPATH"] = os.pathsep.join([options.extension, environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--steps", str(options.steps), "--experts", str(options.experts), "--train", way, str(int(fp8)), f"{folder}/store"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300], "tail": done.stderr[-1500:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extension", default="")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options.train[0], options.train[1] == "1", options.steps, options.experts, options.train[2])
    results = {}
    for fp8 in (False, True):
        name = "FP8 delayed" if fp8 else "BF16"
        rows = results[name] = {way: child(way, fp8, options) for way in WAYS}
        peer = rows["extension"]
        for way, row in rows.items():
            if "error" in row:
                print(f"{name:12} {way:10} does not run: {row['error']}")
                continue
            beside = ""
            if "error" not in peer:
                apart = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], peer["losses"]))
                beside = f"  of the extension's time {row['ms'] / peer['ms']:6.3f}, losses apart at most {apart * 100:.3f} %"
            print(f"{name:12} {way:10} {row['ms']:8.2f} ms  loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}{beside}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
