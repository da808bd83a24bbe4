#!/usr/bin/env python3
"""Trains a GPT of megatron-core with its Transformer Engine specification, on one GPU or several: with te_fl under Transformer Engine's names, with
NVIDIA's package on te-fl, and with NVIDIA's package on its own extension. Prints the losses on the same batches and the milliseconds per step.

usage: megatron_step.py [--extension FOLDER] [--steps N] [--experts N] [--tp N] [--dp N] [--hidden N] [--length N] [--noise P] [--recipe NAME]
                        [--ways W ..] [--only bf16|fp8] [--profile] [--json FILE]
  --extension  a folder with transformer_engine and its compiled libraries, for the peer's process (default: where Python finds them)
  --experts    experts of each layer's mixture, top 2; 0: a dense MLP (default 0)
  --tp, --dp   ranks that divide the layers, with sequence parallelism, and the batch, by Megatron's DistributedDataParallel; a GPU each (default 1 and 1)
  --hidden     hidden size, with hidden / 64 heads (default 1024)
  --length     tokens of a sequence; a batch is two of them for each data-parallel rank (default 512)
  --noise      the share of random, unlearnable tokens; 0: the model learns the text in about ten steps, in which the loss falls by
               a quarter per step, so that rounding differences are magnified (default 0)
  --recipe     FP8 recipe: delayed or tensorwise, which is current scaling (default delayed)

  --ways       some of names, inside, extension and nudged (default: all but nudged); nudged is extension with the last bit of one in 64 parameters
               changed at the start: it shows how much rounding alone changes the losses
  --only       runs only bf16 or only fp8
  --profile    prints for each way what the first rank's steps spend on the host and on the GPU, most expensive first, after its times

Two layers, BF16 and FP8. Needs megatron-core, te_fl on PYTHONPATH and TE_FL_PLUGIN_MODULES naming the CUDA plugin of a build.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time

WAYS = ("names", "inside", "extension", "nudged")


def nudge(parameters):
    """Flips the last bit of one in 64 values, the same ones in each run."""
    import torch
    generator = torch.Generator().manual_seed(5)
    for p in parameters:
        bits = p.detach().view(torch.int16)
        bits ^= (torch.randint(64, p.shape, generator=generator) == 0).to(bits)


def noisy(texts, share, generator):
    import torch
    random = torch.rand(texts.shape, generator=generator) < share
    return torch.where(random, torch.randint(512, texts.shape, generator=generator), texts)


def profile(steps, rank):
    import torch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as found:
        steps()
        torch.cuda.synchronize()
    if rank == 0:
        table = found.key_averages()
        print("PROFILE " + json.dumps([table.table(sort_by=by, row_limit=22, max_name_column_width=70) for by in ("self_cpu_time_total", "self_cuda_time_total")]))


def train(way, fp8, options, rank, store):
    steps, experts, tp, dp, hidden, length = options.steps, options.experts, options.tp, options.dp, options.hidden, options.length
    import warnings
    warnings.simplefilter("ignore")
    import te_fl
    if way == "names":
        te_fl.as_transformer_engine()
    elif way == "inside":
        te_fl.inside_transformer_engine()
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=tp * dp, device_id=torch.device("cuda", rank))
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(123)
    chosen = {"fp8": "hybrid", "fp8_recipe": options.recipe, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"} if fp8 else {}
    if experts:
        chosen.update(num_moe_experts=experts, moe_router_topk=2, moe_grouped_gemm=True, moe_aux_loss_coeff=0.01, moe_permute_fusion=False,
                       add_bias_linear=False, moe_ffn_hidden_size=1024)
    config = TransformerConfig(num_layers=2, hidden_size=hidden, num_attention_heads=hidden // 64, ffn_hidden_size=4 * hidden, hidden_dropout=0.0, attention_dropout=0.0,
                               use_cpu_initialization=True, params_dtype=torch.bfloat16, bf16=True, pipeline_dtype=torch.bfloat16,
                               gradient_accumulation_fusion=False, tensor_model_parallel_size=tp, sequence_parallel=tp > 1, **chosen)
    torch.manual_seed(1)
    model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(num_experts=experts or None, moe_grouped_gemm=bool(experts)),
                     vocab_size=512, max_sequence_length=length, position_embedding_type="learned_absolute").cuda().bfloat16()
    several, whole = tp * dp > 1, model
    if several:
        model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
    parameters = list(model.parameters())
    if way == "nudged":
        nudge(parameters)
    optimizer = torch.optim.Adam(parameters, 3e-4)
    generator, own = torch.Generator().manual_seed(0), parallel_state.get_data_parallel_rank()
    texts = [(torch.randint(512, (2 * dp, 1), generator=generator) + 3 * torch.arange(length + 1)) % 512 for _ in range(steps)]
    texts = [noisy(text, options.noise, generator)[2 * own:2 * own + 2].cuda() for text in texts]
    places, losses = torch.arange(length, device="cuda").repeat(2, 1), []

    def parse_pass(text):
        """Runs a forward and a backward as Megatron's training loop does."""
        if several:
            model.zero_grad_buffer()
        else:
            model.zero_grad()
        whole.set_is_first_microbatch()  # without this call the FP8 weights stay those of the first step
        loss = model(text[:, :-1], places, None, labels=text[:, 1:]).mean()
        loss.backward()
        if several:
            finalize_model_grads([model])
        return loss.detach()

    def step(text):
        loss = parse_pass(text)
        if several:
            for p in parameters:
                p.grad = p.main_grad.to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()
        return loss
    for text in texts:
        losses.append(step(text))
    losses = torch.stack(losses)
    if dp > 1:
        dist.all_reduce(losses, dist.ReduceOp.AVG, group=parallel_state.get_data_parallel_group())
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for text in texts[:10]:
            parse_pass(text)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 10 * 1e3)
    if options.profile:
        profile(lambda: [parse_pass(text) for text in texts[:5]], rank)
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses.tolist(), "ms": sorted(times)[2], "served": sorted({u["impl_id"] for u in te_fl.usage()})}), flush=True)
    dist.destroy_process_group()


def child(way, fp8, options):
    environment = dict(os.environ)
    # Megatron requires CUDA_DEVICE_MAX_CONNECTIONS=1 under sequence parallelism. NVLink multicast (NVLS) is off because it can disable the GPUs of a
    # shared host.
    environment.update(NCCL_NVLS_ENABLE="0", **({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if options.tp > 1 else {}))
    if way in ("extension", "nudged") and options.extension:
        environment["PYTHONPATH"] = os.pathsep.join([options.extension, environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        same = [f"--{name}={getattr(options, name)}" for name in ("steps", "experts", "tp", "dp", "hidden", "length", "noise", "recipe")] + ["--profile"] * options.profile
        logs = [open(f"{folder}/{rank}", "w+") for rank in range(options.tp * options.dp)]
        ranks = [subprocess.Popen([sys.executable, __file__, *same, "--train", way, str(int(fp8)), str(rank), f"{folder}/store"], env=environment, stdout=log, stderr=log)
                 for rank, log in enumerate(logs)]
        end = time.monotonic() + 180
        while any(r.poll() is None for r in ranks) and time.monotonic() < end and not any(r.poll() for r in ranks):
            time.sleep(0.1)
        time.sleep(1 if any(r.poll() for r in ranks) else 0)  # gives the other ranks a second to print their own errors
        failed = [r for r, process in enumerate(ranks) if process.poll() != 0]
        for process in ranks:
            process.kill()
            process.wait()
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
            log.close()
    for line in texts[0].splitlines():
        if line.startswith("PROFILE "):
            print(way, *json.loads(line[8:]), sep="\n")
    for line in texts[0].splitlines():
        if line.startswith("RESULT ") and not failed:
            return json.loads(line[7:])
    text = texts[failed[0]] if failed else texts[0]
    lines = text.strip().splitlines() or ["no output"]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: *)?[\w.]*(Error|Exception|Unsupported|Interrupt)\b", line)]
    return {"error": (errors or lines)[-1][:300], "tail": text[-3000:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extension", default="")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--experts", type=int, default=0)
    for name, default in (("tp", 1), ("dp", 1), ("hidden", 1024), ("length", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--recipe", choices=("delayed", "tensorwise"), default="delayed")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:3])
    parser.add_argument("--only", choices=("bf16", "fp8"))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        return train(options.train[0], options.train[1] == "1", options, int(options.train[2]), options.train[3])
    results = {}
    for fp8 in (False, True) if options.only is None else (options.only == "fp8",):
        name = f"FP8 {options.recipe}" if fp8 else "BF16"
        rows = results[name] = {way: child(way, fp8, options) for way in options.ways}
        peer = rows.get("extension", {"error": "not requested"})
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
