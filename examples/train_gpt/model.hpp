#pragma once

#include <memory>
#include <vector>

#include "block.hpp"
#include "options.hpp"
#include "te_fl/nn.hpp"
#include "te_fl/te_fl.hpp"

namespace train_gpt {

inline constexpr int64_t kVocabulary = 256;  // bytes

// Embedding, layers, final norm and output projection. Layout [batch, sequence].
class Gpt : public te_fl::nn::Module {
 public:
  // Contexts of one forward; one per microbatch in flight.
  struct Contexts {
    te_fl::nn::Ctx tokens, positions, sum, norm, head, loss;
    std::vector<Block::Contexts> layers;
  };

  // `parallel`: the ranks that share the layers and the vocabulary.
  static te_fl::Result<std::unique_ptr<Gpt>> create(const Options& options, te_fl::Device device,
                                                    const te_fl::nn::TensorParallel& parallel);
  // inputs I32 [B, S] -> logits [B, S, 256 / ranks]: this rank's columns. contexts null: inference.
  te_fl::Result<te_fl::Tensor> forward(const te_fl::Tensor& inputs, Contexts* contexts,
                                       const te_fl::nn::ForwardOptions& options = {});
  te_fl::Status backward(const te_fl::Tensor& dlogits, Contexts& contexts);
  te_fl::nn::CrossEntropyLoss& loss() { return loss_; }

 private:
  explicit Gpt(const te_fl::nn::TensorParallel& parallel)
      : parallel_(parallel), loss_({.parallel = parallel}) {}
  te_fl::Status build(const Options& options, te_fl::Device device);
  te_fl::Result<te_fl::Tensor> make_positions(int64_t batch, int64_t seq_len) const;

  te_fl::nn::TensorParallel parallel_;
  te_fl::Device device_;
  std::unique_ptr<te_fl::nn::Embedding> tokens_;
  std::unique_ptr<te_fl::nn::Embedding> positions_;  // null: RoPE
  // Positions of a training batch; allocated once, as a graph reads them.
  te_fl::Tensor training_positions_;
  te_fl::nn::Residual sum_;
  te_fl::nn::AttentionInputs attention_;
  std::vector<std::unique_ptr<Block>> layers_;
  std::unique_ptr<te_fl::nn::Module> norm_;
  te_fl::nn::LayerNorm* layer_norm_ = nullptr;  // exactly one of layer_norm_ and rms_norm_ is set;
                                                // norm_ owns the module
  te_fl::nn::RMSNorm* rms_norm_ = nullptr;
  std::unique_ptr<te_fl::nn::Linear> head_;
  te_fl::nn::CrossEntropyLoss loss_;
};

}  // namespace train_gpt
