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
  int64_t num_embeddings = 0;  // V
  int64_t hidden_size = 0;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;
  init::Shard shard = {};  // of the weight, whose initial values are then those of the whole there
  // The table has one rank's rows of those that divide the whole so: num_embeddings and shard are
  // this rank's, as shard_of() makes them.
  TensorParallel parallel = {};
};

// The rows that this rank of `parallel` has of the table `whole`, in the order of the ranks.
// INVALID_ARGUMENT if the number of ranks does not divide num_embeddings.
TE_FL_API Result<EmbeddingOptions> shard_of(EmbeddingOptions whole, const TensorParallel& parallel);

// y[i] = weight[indices[i]]. indices I32 or I64 [...] -> [..., hidden]. Parameter: weight [V,
// hidden]. Indices outside [0, V) are INVALID_ARGUMENT: at once on the host and under
// TE_FL_VALIDATE, on a device of the next wait for the stream.
// Of a table that ranks divide, V is that of the whole. All ranks look up the same indices: each
// has zeros for those outside of its rows, and y is the sum over the ranks, or under sequence
// parallelism this rank's part of the sum's first dimension, as dy is then.
class TE_FL_API Embedding : public Module {
 public:
  static Result<std::unique_ptr<Embedding>> create(const EmbeddingOptions& options);
  ~Embedding() override;
  Result<Tensor> forward(const Tensor& indices, Ctx* ctx);
  // Adds to the weight's gradient; there is no gradient of the indices.
  Status backward(const Tensor& dy, Ctx& ctx);
  // For LinearOptions::tied_weight.
  const std::shared_ptr<Parameter>& weight() const noexcept { return weight_; }

 private:
  explicit Embedding(const EmbeddingOptions& options);
  Result<Tensor> rows(const Tensor& indices);
  EmbeddingOptions options_;
  std::shared_ptr<detail::IdTable> own_;  // null: nothing is divided
  std::shared_ptr<Parameter> weight_;
};

// y = a + b, with dropout of b if p is not 0 and ctx is given; the residual connection, also usable
// for adding position embeddings.
class TE_FL_API Residual : public Module {
 public:
  explicit Residual(float dropout = 0) : p_(dropout) {}
  Result<Tensor> forward(const Tensor& a, const Tensor& b, Ctx* ctx);
  // Gradient of b; that of a is dy itself.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);

 private:
  float p_;
};

// y = dropout(x), the identity without ctx.
class TE_FL_API Dropout : public Module {
 public:
  explicit Dropout(float p) : p_(p) {}
  Result<Tensor> forward(const Tensor& x, Ctx* ctx);
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);

 private:
  float p_;
};

// Stochastic depth (arXiv 1603.09382): with probability p all of x[i, ...] becomes 0, else it is
// divided by 1 - p, for each index i of the first dimension, as in Transformer Engine: a sample in
// bshd, a position in sbhd. The identity without ctx.
class TE_FL_API DropPath : public Module {
 public:
  explicit DropPath(float p) : p_(p) {}
  Result<Tensor> forward(const Tensor& x, Ctx* ctx);
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx);

 private:
  float p_;
};

}  // namespace te_fl::nn
