#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model.hpp"
#include "options.hpp"
#include "ranks.hpp"
#include "text.hpp"

namespace train_gpt {

// A model, its text and its optimizer: one step at a time, what they give on the held-out text, and
// what they write. Belongs to the thread that made it.
class Trainer {
 public:
  // Reads the text, makes the model, loads --load's checkpoint (and says so) and captures --graph's
  // graph.
  // Every rank of the job makes one, and calls the same of its functions.
  static te_fl::Result<std::unique_ptr<Trainer>> create(const Options& options,
                                                        te_fl::Device device, const Ranks& ranks);

  int64_t parameters() const { return model_->parameter_count(); }
  const Text& text() const { return *text_; }
  // One optimizer step; the mean loss of its batch, nats per byte.
  te_fl::Result<double> step(int64_t index);
  // Mean loss over windows spread evenly over the held-out text, nats per byte.
  te_fl::Result<double> validate();
  // Continues the prompt, byte by byte.
  te_fl::Result<std::string> sample();
  // Writes --save's checkpoint.
  te_fl::Status save() const;

 private:
  explicit Trainer(const Options& options, te_fl::Device device, const Ranks& ranks);
  te_fl::Status load();
  te_fl::nn::AutocastOptions autocast() const;
  te_fl::Result<std::vector<te_fl::Tensor>> compute();
  te_fl::Status use_graph();
  static te_fl::Result<te_fl::Tensor> to_host_f32(const te_fl::Tensor& row);
  char pick(const float* logits, uint64_t counter) const;

  Options options_;
  te_fl::Device device_;
  Ranks ranks_;
  Part part_;  // of each batch
  std::optional<te_fl::nn::Recipe> recipe_;
  std::optional<Text> text_;
  te_fl::nn::Context random_;
  std::unique_ptr<te_fl::nn::ContextScope> scope_;
  std::unique_ptr<Gpt> model_;
  std::unique_ptr<te_fl::nn::Adam> adam_;
  std::unique_ptr<te_fl::nn::DataParallel> data_parallel_;
  std::vector<te_fl::Tensor> batches_;  // inputs and targets of each microbatch
  std::unique_ptr<te_fl::nn::GraphedStep> graphed_;
};

}  // namespace train_gpt
