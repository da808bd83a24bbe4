#include "trainer.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace train_gpt {

namespace nn = te_fl::nn;
using te_fl::Result;
using te_fl::Status;
using te_fl::Tensor;

namespace {

// Returns build/data/text.txt for the program build/release/bin/train_gpt; tools/fetch_text.sh
// downloads the file.
std::string default_text() {
  char path[4096];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path);
  std::string exe(path, n > 0 ? static_cast<size_t>(n) : 0);
  for (int up = 0; up < 3 && !exe.empty(); ++up) exe.erase(std::min(exe.size(), exe.rfind('/')));
  return exe + "/data/text.txt";
}

// Warm-up over a tenth of the steps (at most 100), then cosine decay to a tenth of the peak.
float learning_rate(const Options& o, int64_t step) {
  const double warmup = std::clamp<double>(static_cast<double>(o.steps) / 10, 1, 100);
  const double s = static_cast<double>(step) + 1;
  if (s < warmup) return static_cast<float>(o.lr * s / warmup);
  const double t = (s - warmup) / std::max(1.0, static_cast<double>(o.steps) - warmup);
  return static_cast<float>(o.lr * (0.55 + 0.45 * std::cos(M_PI * std::min(t, 1.0))));
}

}  // namespace

Trainer::Trainer(const Options& options, te_fl::Device device, const Ranks& ranks)
    : options_(options),
      device_(device),
      ranks_(ranks),
      part_{ranks.data_rank(), options.dp},
      random_(options.seed + static_cast<uint64_t>(ranks.data_rank())),
      scope_(std::make_unique<nn::ContextScope>(random_)) {}

Result<std::unique_ptr<Trainer>> Trainer::create(const Options& options, te_fl::Device device,
                                                 const Ranks& ranks) {
  std::unique_ptr<Trainer> trainer(new Trainer(options, device, ranks));
  Trainer& t = *trainer;
  if (options.recipe != "none") {
    TE_FL_ASSIGN_OR_RETURN(t.recipe_, nn::parse_recipe(options.recipe));
  }
  if (options.fp8_attention) std::get<nn::DelayedScaling>(*t.recipe_).fp8_dpa = true;
  TE_FL_ASSIGN_OR_RETURN(
      t.text_, Text::load(options.data.empty() ? default_text() : options.data, options.seq_len));
  TE_FL_ASSIGN_OR_RETURN(t.model_, Gpt::create(options, t.device_, ranks.tensor));
  TE_FL_ASSIGN_OR_RETURN(
      t.data_parallel_,
      nn::DataParallel::create(t.model_->parameters(), ranks.data, {.zero = options.zero}));
  nn::AdamOptions adam{
      .lr = static_cast<float>(options.lr),
      .beta2 = 0.95f,
      .weight_decay = 0.1f,
      .max_grad_norm = 1.0f,
      .decay = [](std::string_view, const Tensor& value) { return value.rank() > 1; },
      .capturable = !t.device_.is_host(),  // avoids a wait for the device in each step
      .write_fp8_weights = options.fp8_weights,
      .zero = options.zero ? t.data_parallel_.get() : nullptr};
  TE_FL_ASSIGN_OR_RETURN(t.adam_, nn::Adam::create(t.model_->parameters(), adam));
  t.adam_->set_norm_ranks(ranks.tensor.ranks);
  if (!options.load.empty()) {
    TE_FL_RETURN_IF_ERROR(t.load());
    std::printf("loaded %s at step %lld\n", options.load.c_str(),
                static_cast<long long>(t.adam_->steps()));
  }
  if (options.graph) {
    if (Status status = t.use_graph(); !status) return status.wrap("--graph");
  }
  return trainer;
}

Status Trainer::load() {
  const std::optional<nn::Context>& own = ranks_.tensor.random;
  const uint64_t seed = random_.random().seed, own_seed = own ? own->random().seed : 0;
  TE_FL_RETURN_IF_ERROR(
      nn::load_checkpoint(options_.load, ranks_.tensor, *model_, adam_.get()).status());
  if (ranks_.data_rank() == 0) return {};
  // The checkpoint contains the RNG state (seed and offset) of the first data-parallel rank. The
  // other data-parallel ranks keep their own seeds and take over the offset.
  random_.set_random({seed, random_.random().offset});
  if (own) nn::Context(*own).set_random({own_seed, own->random().offset});
  return {};
}

nn::AutocastOptions Trainer::autocast() const {
  return {.enabled = recipe_.has_value(), .amax_reduction = ranks_.amaxes};
}

Result<double> Trainer::step(int64_t index) {
  std::vector<Tensor> batches;
  for (int64_t i = 0; i < options_.microbatches; ++i) {
    TE_FL_ASSIGN_OR_RETURN(
        Batch batch, text_->training(options_.seed, index * options_.microbatches + i,
                                     options_.batch, graphed_ ? te_fl::Device{} : device_, part_));
    batches.push_back(std::move(batch.inputs));
    batches.push_back(std::move(batch.targets));
  }
  adam_->set_lr(learning_rate(options_, index));
  std::vector<Tensor> losses;
  if (graphed_) {
    TE_FL_ASSIGN_OR_RETURN(losses, graphed_->run(batches));
  } else {
    batches_ = std::move(batches);
    TE_FL_ASSIGN_OR_RETURN(losses, compute());
  }
  TE_FL_RETURN_IF_ERROR(average(ranks_, losses));
  double loss = 0;
  for (const Tensor& part : losses) {
    TE_FL_ASSIGN_OR_RETURN(const float value, nn::item(part));
    loss += value;
  }
  if (!std::isfinite(loss)) {
    return te_fl::internal_error("the loss of step " + std::to_string(index + 1) +
                                 " is not finite; lower --lr");
  }
  return loss;
}

Result<double> Trainer::validate() {
  double total = 0;
  for (int64_t i = 0; i < options_.eval_batches; ++i) {
    TE_FL_ASSIGN_OR_RETURN(const Batch batch, text_->held_out(i, options_.eval_batches,
                                                              options_.batch, device_, part_));
    nn::autocast fp8(autocast(), recipe_.value_or(nn::DelayedScaling{}));
    TE_FL_ASSIGN_OR_RETURN(const Tensor logits, model_->forward(batch.inputs, nullptr));
    TE_FL_ASSIGN_OR_RETURN(const Tensor loss,
                           model_->loss().forward(logits, batch.targets, nullptr));
    TE_FL_RETURN_IF_ERROR(average(ranks_, {loss}));
    TE_FL_ASSIGN_OR_RETURN(const float value, nn::item(loss));
    total += value;
  }
  if (!std::isfinite(total)) {
    return te_fl::internal_error("the loss on the held-out text is not finite; lower --lr");
  }
  return total / static_cast<double>(options_.eval_batches);
}

Result<std::string> Trainer::sample() {
  std::string text = options_.prompt.empty() ? "\n" : options_.prompt;
  for (int64_t i = 0; i < options_.sample_bytes; ++i) {
    const int64_t length = std::min<int64_t>(static_cast<int64_t>(text.size()), options_.seq_len);
    // With sequence parallelism, each tensor-parallel rank needs one sequence, so the prompt is
    // repeated.
    const int64_t copies = options_.sp ? options_.tp : 1;
    TE_FL_ASSIGN_OR_RETURN(Tensor inputs, Tensor::empty({copies, length}, te_fl::DType::kI32));
    for (int64_t s = 0; s < copies * length; ++s) {
      const auto back = static_cast<size_t>(length - s % length);
      inputs.data<int32_t>()[s] = static_cast<unsigned char>(text[text.size() - back]);
    }
    TE_FL_ASSIGN_OR_RETURN(inputs, inputs.to(device_));
    nn::autocast fp8(autocast(), recipe_.value_or(nn::DelayedScaling{}));
    TE_FL_ASSIGN_OR_RETURN(const Tensor logits, model_->forward(inputs, nullptr));
    TE_FL_ASSIGN_OR_RETURN(const Tensor own, logits.slice(0, 0, 1));
    TE_FL_ASSIGN_OR_RETURN(const Tensor last, own.slice(1, length - 1, length));
    TE_FL_ASSIGN_OR_RETURN(const Tensor part, last.view({last.numel()}));
    TE_FL_ASSIGN_OR_RETURN(const Tensor whole, nn::gather_rows(ranks_.tensor, part));
    TE_FL_ASSIGN_OR_RETURN(const Tensor row, to_host_f32(whole));
    text += pick(row.data<float>(), static_cast<uint64_t>(i));
  }
  return text;
}

Status Trainer::save() const {
  // Data-parallel ranks have equal states, so only the first saves, unless ZeRO shards the
  // optimizer's state.
  if (ranks_.data_rank() != 0 && !options_.zero) return {};
  return nn::save_checkpoint(options_.save, ranks_.tensor, *model_, adam_.get(),
                             {{"recipe", options_.recipe}, {"style", options_.style}});
}

// Runs the step on batches_, entirely on the device, so that a graph can capture it. Returns one
// loss per microbatch.
Result<std::vector<Tensor>> Trainer::compute() {
  TE_FL_RETURN_IF_ERROR(model_->zero_grad());
  const int64_t m = options_.microbatches;
  const double divisor = static_cast<double>(options_.batch / part_.count * options_.seq_len * m);
  std::vector<Tensor> losses;
  for (int64_t i = 0; i < m; ++i) {
    const Tensor& inputs = batches_[static_cast<size_t>(2 * i)];
    const Tensor& targets = batches_[static_cast<size_t>(2 * i + 1)];
    Gpt::Contexts contexts;
    {
      nn::autocast fp8(autocast(), recipe_.value_or(nn::DelayedScaling{}));
      TE_FL_ASSIGN_OR_RETURN(const Tensor logits,
                             model_->forward(inputs, &contexts, {.is_first_microbatch = i == 0}));
      TE_FL_ASSIGN_OR_RETURN(Tensor loss,
                             model_->loss().forward(logits, targets, &contexts.loss, divisor));
      losses.push_back(std::move(loss));
      TE_FL_RETURN_IF_ERROR(fp8.exit());
    }
    TE_FL_ASSIGN_OR_RETURN(const Tensor dlogits, model_->loss().backward(contexts.loss));
    std::optional<nn::DataParallel::LastBackward> last;
    if (i + 1 == m) last.emplace(data_parallel_->last_backward());
    TE_FL_RETURN_IF_ERROR(model_->backward(dlogits, contexts));
  }
  TE_FL_RETURN_IF_ERROR(nn::backward_end());
  TE_FL_RETURN_IF_ERROR(nn::sum_partial_gradients(ranks_.tensor, model_->parameters()));
  TE_FL_RETURN_IF_ERROR(data_parallel_->average_gradients());
  TE_FL_RETURN_IF_ERROR(adam_->step());
  return losses;
}

// Captures the step into a graph after a few eager steps.
Status Trainer::use_graph() {
  for (int64_t i = 0; i < 2 * options_.microbatches; ++i) {
    TE_FL_ASSIGN_OR_RETURN(Tensor batch,
                           Tensor::zeros({options_.batch / part_.count, options_.seq_len},
                                         te_fl::DType::kI32, device_));
    batches_.push_back(std::move(batch));
  }
  TE_FL_ASSIGN_OR_RETURN(graphed_,
                         nn::GraphedStep::create(device_, [this] { return compute(); },
                                                 {.inputs = batches_, .optimizer = adam_.get()}));
  return {};
}

Result<Tensor> Trainer::to_host_f32(const Tensor& row) {
  TE_FL_ASSIGN_OR_RETURN(Tensor out, Tensor::empty(row.shape(), te_fl::DType::kF32, row.device()));
  TE_FL_RETURN_IF_ERROR(te_fl::ops::strided_copy({.input = row, .output = out}));
  return row.device().is_host() ? Result<Tensor>(std::move(out)) : out.to(te_fl::Device{});
}

// Draws a byte from softmax(logits / temperature) by inverting the cumulative sum.
char Trainer::pick(const float* logits, uint64_t counter) const {
  const float top = *std::max_element(logits, logits + kVocabulary);
  double cumulative[kVocabulary], sum = 0;
  for (int64_t v = 0; v < kVocabulary; ++v) {
    sum += std::exp((logits[v] - top) / options_.temperature);
    cumulative[v] = sum;
  }
  const double at = static_cast<double>(mix(options_.seed ^ 0x5a5a, counter) >> 11) * 0x1p-53 * sum;
  const auto* found = std::upper_bound(cumulative, cumulative + kVocabulary, at);
  return static_cast<char>(std::min<int64_t>(found - cumulative, kVocabulary - 1));
}

}  // namespace train_gpt
