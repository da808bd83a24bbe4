#include "options.hpp"

#include <CLI/CLI.hpp>
#include <iostream>

namespace train_gpt {

bool parse_options(int argc, char** argv, Options& o, int* exit_code) {
  CLI::App app{
      "Trains a byte-level GPT, made of te-fl's TransformerLayer, on a text file; validates it on "
      "the text's last tenth\n"
      "and lets it write. Every tensor operation goes through the dispatcher; the closing table "
      "says which\n"
      "implementation served each op.",
      "train_gpt"};
  app.footer(
      "Examples:\n"
      "  train_gpt                                  FP8, delayed scaling (HYBRID), the default "
      "text\n"
      "  train_gpt --recipe none --steps 50         without FP8\n"
      "  train_gpt --style llama --recipe current   RMSNorm, SwiGLU, RoPE, current scaling\n"
      "  TE_FL_PREFER=reference train_gpt --steps 5 the same on the reference ops");
  app.option_defaults()->always_capture_default();
  app.add_option("--data", o.data,
                 "text file (default: build/data/text.txt, see tools/fetch_text.sh)");
  app.add_option("--recipe", o.recipe, "FP8 recipe")
      ->check(CLI::IsMember({"delayed", "current", "block", "none"}));
  app.add_flag("--fp8-attention", o.fp8_attention,
               "attention itself in FP8 (fp8_dpa); with --recipe delayed");
  app.add_option("--style", o.style,
                 "gpt: LayerNorm, GELU, learned positions; llama: RMSNorm, SwiGLU, RoPE, no biases")
      ->check(CLI::IsMember({"gpt", "llama"}));
  app.add_option("--dtype", o.dtype, "dtype of parameters and activations")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  app.add_option("--device", o.device, "device, e.g. cpu");
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 32);
  app.add_flag("--graph", o.graph,
               "capture the training step into a graph after three steps and launch that; for "
               "devices that can, e.g. cuda:0");
  app.add_option("--steps", o.steps, "optimizer steps")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 32));
  app.add_option("--batch", o.batch, "sequences per microbatch")->check(positive);
  app.add_option("--microbatches", o.microbatches,
                 "microbatches per step; weights are quantised once per step")
      ->check(positive);
  app.add_option("--seq-len", o.seq_len, "bytes of context")->check(positive);
  app.add_option("--hidden", o.hidden, "model width")->check(positive);
  app.add_option("--layers", o.layers, "Transformer layers")->check(positive);
  app.add_option("--heads", o.heads, "attention heads")->check(positive);
  app.add_option("--groups", o.groups, "key/value groups (0: as many as heads)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--lr", o.lr, "peak learning rate")->check(CLI::PositiveNumber);
  app.add_option("--dropout", o.dropout, "dropout of attention and residual branches")
      ->check(CLI::Range(0.0, 0.99));
  app.add_option("--seed", o.seed, "seed of initial weights, batches, dropout and sampling");
  app.add_option("--eval-batches", o.eval_batches, "validation batches")->check(positive);
  app.add_option("--report-every", o.report_every, "steps between lines of the log")
      ->check(positive);
  app.add_option("--sample-bytes", o.sample_bytes, "length of the sample")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--prompt", o.prompt, "what the sample continues");
  app.add_option("--temperature", o.temperature, "of sampling")->check(CLI::PositiveNumber);
  app.add_option("--save", o.save,
                 "write a safetensors checkpoint (with FP8 and optimizer state) at the end");
  app.add_option("--load", o.load, "start from a checkpoint that --save wrote");
  app.add_option("--json", o.json, "write the results as JSON to this file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    *exit_code = app.exit(error) == 0 ? 0 : 2;
    return false;
  }
  const auto fail = [&](const std::string& text) {
    std::cerr << "train_gpt: " << text << "\n";
    *exit_code = 2;
    return false;
  };
  if (o.fp8_attention && o.recipe != "delayed") {
    return fail("--fp8-attention goes with --recipe delayed, not with " + o.recipe +
                ": only delayed scaling has the scales of FP8 attention");
  }
  if (o.hidden % o.heads != 0) {
    return fail("--hidden " + std::to_string(o.hidden) + " must be a multiple of --heads " +
                std::to_string(o.heads));
  }
  if ((o.hidden / o.heads) % 2 != 0 && o.style == "llama") {
    return fail(
        "--style llama rotates pairs: the head size --hidden / --heads must be even, it is " +
        std::to_string(o.hidden / o.heads));
  }
  if (o.groups != 0 && o.heads % o.groups != 0) {
    return fail("--heads " + std::to_string(o.heads) + " must be a multiple of --groups " +
                std::to_string(o.groups));
  }
  return true;
}

}  // namespace train_gpt
