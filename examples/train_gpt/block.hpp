#pragma once

#include <memory>

#include "te_fl/nn.hpp"

namespace train_gpt {

// A layer of the model: a TransformerLayer, or attention and a mixture of experts.
class Block : public te_fl::nn::Module {
 public:
  // The contexts of one forward.
  struct Contexts {
    te_fl::nn::Ctx layer, norm, moe, sum;
  };
  static te_fl::Result<std::unique_ptr<Block>> create(
      const te_fl::nn::TransformerLayerOptions& options);
  // The MLP of `options` becomes a mixture of `experts`. aux_loss_grad: F32 [1], the gradient of
  // each layer's auxiliary loss.
  static te_fl::Result<std::unique_ptr<Block>> create(
      const te_fl::nn::TransformerLayerOptions& options, int64_t experts, int64_t top_k,
      const te_fl::Tensor& aux_loss_grad);

  te_fl::Result<te_fl::Tensor> forward(const te_fl::Tensor& x, Contexts* contexts,
                                       const te_fl::nn::AttentionInputs& attention,
                                       const te_fl::nn::ForwardOptions& options);
  te_fl::Result<te_fl::Tensor> backward(const te_fl::Tensor& dy, Contexts& contexts);
  // The module that has the layer's parameters. Without experts it is the TransformerLayer, so that
  // checkpoints have that module's names.
  te_fl::nn::Module& module() { return layer_ != nullptr ? *layer_ : static_cast<Module&>(*this); }

 private:
  Block() = default;
  std::unique_ptr<te_fl::nn::TransformerLayer> layer_;  // null with experts
  std::unique_ptr<te_fl::nn::MultiheadAttention> attention_;
  std::unique_ptr<te_fl::nn::Norm> norm_;
  std::unique_ptr<te_fl::nn::MoELayer> moe_;
  std::unique_ptr<te_fl::nn::Residual> sum_;
  te_fl::Tensor aux_loss_grad_;
};

}  // namespace train_gpt
