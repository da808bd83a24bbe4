#pragma once

#include <memory>

#include "te_fl/nn/modules/init.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/nn/modules/tensor_parallel.hpp"

namespace te_fl::nn {

namespace detail {
class IdTable;
}

struct EmbeddingOptions {
  int64_t num_embeddings = 0;  // V, the size of the vocabulary
  int64_t hidden_size = 0;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;
  // position of this weight in the full weight; the initial values are those at this position
  init::Shard shard = {};
  // The ranks among which the table is sharded by rows. num_embeddings and shard are then those of
  // this rank, as shard_of() computes them.
  TensorParallel parallel = {};
};

// This rank's rows of the table `whole`, in rank order. INVALID_ARGUMENT if the number of ranks
// does not divide num_embeddings.
TE_FL_API Result<EmbeddingOptions> shard_of(EmbeddingOptions whole, const TensorParallel& parallel);

// Embedding table: y[i] = weight[indices[i]]. indices are I32 or I64 [...]; y is [..., hidden].
// Parameter: weight [V, hidden]. An index outside of [0, V) is INVALID_ARGUMENT: immediately on the
// host and with TE_FL_VALIDATE; otherwise, on a device, at the next wait for the stream.
//
// If the table is sharded among ranks, V is the size of the full table. All ranks look up the same
// indices. Each rank computes zeros for indices outside of its rows, and y is the sum over the
// ranks. Under sequence parallelism y and dy are this rank's shard along the first dimension.
class TE_FL_API Embedding : public Module {
 public:
  static Result<std::unique_ptr<Embedding>> create(const EmbeddingOptions& options);
  ~Embedding() override;
  Result<Tensor> forward(const Tensor& indices, Ctx* ctx);
  // Adds to the weight's gradient. Indices have no gradient.
  Status backward(const Tensor& dy, Ctx& ctx);
  // The weight, for example for LinearOptions::tied_weight.
  const std::shared_ptr<Parameter>& weight() const noexcept { return weight_; }

 private:
  explicit Embedding(const EmbeddingOptions& options);
  Result<Tensor> rows(const Tensor& indices);
  EmbeddingOptions options_;
  std::shared_ptr<detail::IdTable> own_;  // null: not sharded
  std::shared_ptr<Parameter> weight_;
};

// Residual connection: y = a + b, with dropout of b if p is not 0 and ctx is given. Can also add
// position embeddings.
class TE_FL_API Residual : public Module {
 public:
  explicit Residual(float dropout = 0) : p_(dropout) {}
  Result<Tensor> forward(const Tensor& a, const Tensor& b, Ctx* ctx);
  // Returns the gradient of b. The gradient of a is dy itself.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);

 private:
  float p_;
};

// y = dropout(x). Without ctx, y = x.
class TE_FL_API Dropout : public Module {
 public:
  explicit Dropout(float p) : p_(p) {}
  Result<Tensor> forward(const Tensor& x, Ctx* ctx);
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);

 private:
  float p_;
};

// Stochastic depth (arXiv 1603.09382): for each index i of the first dimension, x[i, ...] is set to
// 0 with probability p and otherwise divided by 1 - p. As in Transformer Engine, index i is a
// sample in layout bshd and a position in layout sbhd. Without ctx, y = x.
class TE_FL_API DropPath : public Module {
 public:
  explicit DropPath(float p) : p_(p) {}
  Result<Tensor> forward(const Tensor& x, Ctx* ctx);
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);

 private:
  float p_;
};

}  // namespace te_fl::nn
