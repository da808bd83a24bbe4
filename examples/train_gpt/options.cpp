#include "options.hpp"

#include <CLI/CLI.hpp>
#include <iostream>
#include <utility>
#include <vector>

#include "te_fl/environment.hpp"

namespace train_gpt {
namespace {

// Defaults that depend on the device.
struct Sizes {
  const char* dtype;
  int64_t hidden, layers, heads, seq_len, batch, steps;
  double lr;
};
// Trains for half a minute on 2 cores.
constexpr Sizes kHost{"f32", 128, 2, 8, 64, 16, 2000, 2e-3};
// Trains for about ten seconds on an H100.
constexpr Sizes kDevice{"bf16", 512, 6, 8, 256, 32, 1200, 1e-3};

std::string shown(double value) {
  std::string text = std::to_string(value);
  text.erase(text.find_last_not_of('0') + 1);
  return text;
}

// "; did you mean 'x'?", or empty.
std::string near(const std::string& word, const std::vector<std::string>& choices) {
  const std::string best = te_fl::environment::nearest(word, choices);
  return best.empty() ? "" : "; did you mean '" + best + "'?";
}

CLI::Validator choice_validator(std::vector<std::string> choices) {
  const std::string listed = CLI::detail::join(choices, ", ");
  return CLI::Validator(
      [choices = std::move(choices), listed](std::string& value) -> std::string {
        for (const std::string& choice : choices) {
          if (value == choice) return {};
        }
        return "'" + value + "' is not one of " + listed + near(value, choices);
      },
      listed);
}

// Returns an error that names the unknown argument, which CLI11's message does not explain.
std::string unknown_argument(const CLI::App& app) {
  const std::string word = app.remaining().front();
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) names.push_back(option->get_name());
  return "unknown argument '" + word + "'" + near(word.substr(0, word.find('=')), names) +
         " (train_gpt --help lists all)";
}

// Describes a default that fill_defaults() chooses by the device.
std::string by_device(const std::string& host, const std::string& device) {
  return host + ", on a GPU " + device;
}

CLI::Range positive() { return CLI::Range(int64_t{1}, int64_t{1} << 32); }

void add_model_options(CLI::App& app, Options& o) {
  app.add_option("--data", o.data,
                 "text file (default: build/data/text.txt, see tools/fetch_text.sh)");
  app.add_option("--recipe", o.recipe, "FP8 recipe")
      ->check(choice_validator({"delayed", "current", "block", "none"}));
  app.add_flag("--fp8-attention", o.fp8_attention,
               "attention itself in FP8 (fp8_dpa); with --recipe delayed");
  app.add_option("--style", o.style,
                 "gpt: LayerNorm, GELU, learned positions; llama: RMSNorm, SwiGLU, RoPE, no biases")
      ->check(choice_validator({"gpt", "llama"}));
  app.add_option("--dtype", o.dtype, "dtype of parameters and activations")
      ->check(choice_validator({"f32", "bf16", "f16"}))
      ->default_str(by_device(kHost.dtype, kDevice.dtype));
  app.add_option(
      "--device", o.device,
      "cpu, cuda:0, ...; auto: the first device that supports the model's ops itself, else "
      "cpu");
  app.add_flag("--graph", o.graph,
               "capture the training step into a graph after three steps and launch that; for "
               "devices that can, e.g. cuda:0");
  app.add_flag("--fp8-weights", o.fp8_weights,
               "Adam writes the FP8 copies of the weights, so that the forward does not quantise "
               "them; the same losses");
  app.add_option("--steps", o.steps, "optimizer steps")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 32))
      ->default_str(by_device(std::to_string(kHost.steps), std::to_string(kDevice.steps)));
  app.add_option("--batch", o.batch, "sequences per microbatch")
      ->check(positive())
      ->default_str(by_device(std::to_string(kHost.batch), std::to_string(kDevice.batch)));
  app.add_option("--microbatches", o.microbatches,
                 "microbatches per step; weights are quantised once per step")
      ->check(positive());
  app.add_option("--seq-len", o.seq_len, "bytes of context")
      ->check(positive())
      ->default_str(by_device(std::to_string(kHost.seq_len), std::to_string(kDevice.seq_len)));
  app.add_option("--hidden", o.hidden, "model width")
      ->check(positive())
      ->default_str(by_device(std::to_string(kHost.hidden), std::to_string(kDevice.hidden)));
  app.add_option("--layers", o.layers, "Transformer layers")
      ->check(positive())
      ->default_str(by_device(std::to_string(kHost.layers), std::to_string(kDevice.layers)));
  app.add_option("--heads", o.heads, "attention heads")
      ->check(positive())
      ->default_str(by_device(std::to_string(kHost.heads), std::to_string(kDevice.heads)));
  app.add_option("--groups", o.groups, "key/value groups (0: as many as heads)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--experts", o.experts, "experts of each layer, in place of its MLP (0: the MLP)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 16));
  app.add_option("--top-k", o.top_k, "experts that each byte passes; with --experts")
      ->check(positive());
  app.add_option("--lr", o.lr, "peak learning rate")
      ->check(CLI::PositiveNumber)
      ->default_str(by_device(shown(kHost.lr), shown(kDevice.lr)));
  app.add_option("--dropout", o.dropout, "dropout of attention and residual branches")
      ->check(CLI::Range(0.0, 0.99));
  app.add_option("--tp", o.tp, "ranks that divide heads and features of each layer")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16));
  app.add_option("--dp", o.dp, "ranks that divide the batch; --tp times --dp is the job's number")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16));
  app.add_flag("--sp", o.sp, "the --tp ranks divide the sequences between the linear maps, too");
  app.add_flag("--zero", o.zero,
               "the --dp ranks divide Adam's state and its work (ZeRO-1); the same losses");
  app.add_option("--seed", o.seed, "seed of initial weights, batches, dropout and sampling");
}

void add_output_options(CLI::App& app, Options& o) {
  app.add_option("--eval-batches", o.eval_batches, "validation batches")->check(positive());
  app.add_option("--report-every", o.report_every, "steps between lines of the log")
      ->check(positive());
  app.add_option("--sample-bytes", o.sample_bytes, "length of the sample")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--prompt", o.prompt, "what the sample continues");
  app.add_option("--temperature", o.temperature, "of sampling")->check(CLI::PositiveNumber);
  app.add_option("--save", o.save,
                 "write a safetensors checkpoint (with FP8 and optimizer state) at the end");
  app.add_option("--load", o.load, "start from a checkpoint that --save wrote");
  app.add_option("--json", o.json, "write the results as JSON to this file");
  app.add_option("--plot", o.plot, "draw the loss curve into this file, an SVG, at the end");
  app.add_flag("--chart", o.chart,
               "print the loss curve as text at the end; a terminal gets it without asking");
}

}  // namespace

bool parse_options(int argc, char** argv, Options& o, int* exit_code) {
  CLI::App app{
      "Trains a byte-level GPT, made of te-fl's TransformerLayer, on a text file; validates it on "
      "the text's last tenth\n"
      "and lets it write. Every tensor operation goes through the dispatcher; the closing table "
      "says which\n"
      "implementation ran each op.",
      "train_gpt"};
  app.footer(
      "Examples:\n"
      "  train_gpt                                  FP8, delayed scaling (HYBRID), a GPU if there "
      "is one\n"
      "  train_gpt --plot loss.svg --chart          draws the loss curve\n"
      "  train_gpt --recipe none --steps 50         without FP8\n"
      "  train_gpt --style gpt --recipe current     LayerNorm, GELU, positions; current scaling\n"
      "  train_gpt --experts 8 --top-k 2            a mixture of experts in each layer\n"
      "  TE_FL_PREFER=reference train_gpt --steps 5 the same on the reference ops\n"
      "  tools/launch.py -n 4 -- train_gpt --tp 2 --dp 2    on four ranks");
  app.option_defaults()->always_capture_default();
  add_model_options(app, o);
  add_output_options(app, o);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError&) {
    std::cerr << "train_gpt: " << unknown_argument(app) << "\n";
    *exit_code = 2;
    return false;
  } catch (const CLI::ParseError& error) {
    *exit_code = app.exit(error) == 0 ? 0 : 2;
    return false;
  }
  return true;
}

void fill_defaults(Options& o, bool native) {
  const Sizes& sizes = native ? kDevice : kHost;
  const auto fill = [](int64_t& value, int64_t standard) {
    if (value <= 0) value = standard;
  };
  if (o.steps < 0) o.steps = sizes.steps;
  fill(o.batch, sizes.batch);
  fill(o.seq_len, sizes.seq_len);
  fill(o.hidden, sizes.hidden);
  fill(o.layers, sizes.layers);
  fill(o.heads, sizes.heads);
  if (o.lr <= 0) o.lr = sizes.lr;
  if (o.dtype.empty()) o.dtype = sizes.dtype;
}

namespace {

// The layers themselves report sizes that the number of ranks does not divide.
te_fl::Status check_ranks(const Options& o) {
  if (o.sp && o.tp == 1) {
    return te_fl::invalid_argument("--sp divides the sequences over the ranks of --tp, which is 1");
  }
  if (o.zero && o.dp == 1) {
    return te_fl::invalid_argument(
        "--zero divides the optimizer's state over the ranks of --dp, which is 1");
  }
  if (o.zero && o.fp8_weights) {
    return te_fl::invalid_argument(
        "--fp8-weights does not go with --zero: a rank updates parts of the weights, and their FP8 "
        "copies are of the whole");
  }
  const int64_t parts = o.dp * (o.sp ? o.tp : 1);
  if (o.batch % parts != 0) {
    return te_fl::invalid_argument("--batch " + std::to_string(o.batch) +
                                   " must be a multiple of --dp" + (o.sp ? " times --tp" : "") +
                                   ", which is " + std::to_string(parts));
  }
  return {};
}

te_fl::Status check_experts(const Options& o) {
  if (o.experts == 0) return {};
  if (o.top_k > o.experts) {
    return te_fl::invalid_argument("--top-k " + std::to_string(o.top_k) +
                                   " must be at most --experts, which is " +
                                   std::to_string(o.experts));
  }
  if (o.tp != 1) {
    return te_fl::invalid_argument(
        "--experts does not go with --tp " + std::to_string(o.tp) +
        ": the ranks of --tp divide MLPs, not experts; use --dp, or leave one of them out");
  }
  if (o.graph) {
    return te_fl::invalid_argument(
        "--experts does not go with --graph: the host reads how many rows each expert has");
  }
  return {};
}

}  // namespace

te_fl::Status check(const Options& o) {
  TE_FL_RETURN_IF_ERROR(check_experts(o));
  if (o.fp8_attention && o.recipe != "delayed") {
    return te_fl::invalid_argument("--fp8-attention requires --recipe delayed, not " + o.recipe +
                                   ": only delayed scaling has the scales of FP8 attention");
  }
  if (o.fp8_weights && (o.recipe != "delayed" || o.graph)) {
    return te_fl::invalid_argument(
        "--fp8-weights requires --recipe delayed, not " +
        (o.graph ? std::string("--graph") : "--recipe " + o.recipe) +
        ": Adam must know the scales before the values, and the host which copies are fresh");
  }
  if (o.hidden % o.heads != 0) {
    return te_fl::invalid_argument("--hidden " + std::to_string(o.hidden) +
                                   " must be a multiple of --heads " + std::to_string(o.heads));
  }
  if ((o.hidden / o.heads) % 2 != 0 && o.style == "llama") {
    return te_fl::invalid_argument(
        "--style llama rotates pairs: the head size --hidden / --heads must be even, it is " +
        std::to_string(o.hidden / o.heads));
  }
  if (o.groups != 0 && o.heads % o.groups != 0) {
    return te_fl::invalid_argument("--heads " + std::to_string(o.heads) +
                                   " must be a multiple of --groups " + std::to_string(o.groups));
  }
  return check_ranks(o);
}

}  // namespace train_gpt
