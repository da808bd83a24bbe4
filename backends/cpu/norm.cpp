// Layer and RMS normalisation, forward and backward.
#include "te_fl/ops/norm.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "norm_kernels.hpp"
#include "quant_store.hpp"

namespace te_fl::cpu {
namespace {

using backend::Matrix;

constexpr const char* kStatisticsNotDense = "needs contiguous statistics, weights and gradients";

// Loads a tensor into a padded FP32 vector.
std::vector<float> load_vector(const te_fl_tensor& t) {
  const int64_t n = backend::numel(t);
  std::vector<float> values(static_cast<size_t>(padded(n)));
  load_f32(dtype_of(t), backend::data<const char>(t), n, values.data());
  return values;
}

std::vector<float> load_gamma(const te_fl_tensor& gamma, bool zero_centered) {
  std::vector<float> values = load_vector(gamma);
  if (zero_centered) {
    for (float& g : values) g += 1.0f;
  }
  return values;
}

// Row buffers of FP32 for each part of a parallel loop.
class RowBuffers {
 public:
  RowBuffers(int64_t cols, int64_t per_part)
      : pitch_(padded(cols)),
        per_part_(per_part),
        memory_(std::make_unique_for_overwrite<float[]>(
            static_cast<size_t>(pitch_ * per_part * ThreadPool::instance().num_threads()))) {}
  float* row(int64_t part, int64_t i) const {
    return memory_.get() + (part * per_part_ + i) * pitch_;
  }

 private:
  int64_t pitch_, per_part_;
  std::unique_ptr<float[]> memory_;
};

// ---- forward

struct Forward {
  const te_fl_tensor *x, *gamma, *beta, *z, *mu, *rsigma;  // mu NULL: RMS normalisation
  const te_fl_tensor *residual, *sum;                      // both NULL or both set
  float epsilon;
  bool zero_centered_gamma;
};

// The start address of each row of a tensor, and its dtype.
struct Rows {
  explicit Rows(const te_fl_tensor& t)
      : dtype(dtype_of(t)),
        bytes(element_bytes(t)),
        pitch(backend::as_matrix(t).cols * bytes),
        data(backend::data<char>(t)) {}
  void load(int64_t row, int64_t n, float* out) const { load(row, 0, n, out); }
  void load(int64_t row, int64_t col, int64_t n, float* out) const {
    load_f32(dtype, data + row * pitch + col * bytes, n, out);
  }

  int dtype;
  int64_t bytes, pitch;
  char* data;
};

void run_forward(const Forward& args) {
  const Matrix matrix = backend::as_matrix(*args.x);
  const auto gamma = load_gamma(*args.gamma, args.zero_centered_gamma);
  const auto beta = args.beta != nullptr ? load_vector(*args.beta) : std::vector<float>();
  const bool adds = args.sum != nullptr;
  const Rows x(*args.x), residual(adds ? *args.residual : *args.x),
      source(adds ? *args.sum : *args.x);  // x, or its sum with the residual
  float* mu = args.mu != nullptr ? backend::data<float>(*args.mu) : nullptr;
  float* rsigma = backend::data<float>(*args.rsigma);
  std::vector<float> mean_rest(mu != nullptr ? static_cast<size_t>(matrix.rows) : 0);
  const RowBuffers buffers(matrix.cols, adds ? 2 : 1);
  const double count = static_cast<double>(std::max<int64_t>(matrix.cols, 1));

  const auto statistics = [&](int64_t row, int64_t part) {
    float* values = buffers.row(part, 0);
    if (adds) {
      float* other = buffers.row(part, 1);
      x.load(row, matrix.cols, values);
      residual.load(row, matrix.cols, other);
      for (int64_t i = 0; i < matrix.cols; ++i) values[i] += other[i];
      store_f32(source.dtype, values, matrix.cols, source.data + row * source.pitch, false);
    }
    source.load(row, matrix.cols, values);
    float shift = 0.0f;
    if (mu != nullptr && matrix.cols > 0) shift = rough_mean(values, matrix.cols);
    const Moments moments = row_moments(values, matrix.cols, shift);
    double variance = moments.squares / count;
    if (mu != nullptr) {
      const double off = moments.sum / count, exact = shift + off;
      variance = std::max(variance - off * off, 0.0);  // in this order a NaN is kept
      mu[row] = static_cast<float>(exact);
      mean_rest[static_cast<size_t>(row)] = static_cast<float>(exact - mu[row]);
    }
    rsigma[row] = static_cast<float>(1.0 / std::sqrt(variance + args.epsilon));
  };
  const auto values = [&](const Piece& piece, float* out) {
    source.load(piece.row, piece.col, piece.n, out);
    normalise(out, piece.n, mu != nullptr ? mu[piece.row] : 0.0f,
              mu != nullptr ? mean_rest[static_cast<size_t>(piece.row)] : 0.0f, rsigma[piece.row],
              gamma.data() + piece.col, beta.empty() ? nullptr : beta.data() + piece.col, out);
  };
  const FunctionRef<void(int64_t, int64_t)> begin_row(statistics);
  store_output(*args.z, values, {.begin_row = &begin_row});
}

template <class Args>
Refusal refuse_forward(const Args& args) {
  if (!all_dense(args.x, args.residual, args.sum)) return kNotContiguous;
  const te_fl_tensor& z = *args.z;
  const bool plain = backend::scaling(z) == TE_FL_SCALING_NONE;
  for (const te_fl_tensor* in : {args.x, args.residual}) {
    if (in == nullptr) continue;
    if (plain ? overlaps_askew(z, *in) : overlaps(z, *in)) return kOverlaps;
    if (args.sum != nullptr && overlaps_askew(*args.sum, *in)) return kOverlaps;
  }
  return refuse_output(z);
}

void layernorm_fwd(const te_fl_context&, const te_fl_layernorm_fwd_args& args) {
  run_forward({args.x, args.gamma, args.beta, args.z, args.mu, args.rsigma, args.residual, args.sum,
               args.epsilon, args.zero_centered_gamma != 0});
}
Refusal refuse_layernorm_fwd(const te_fl_layernorm_fwd_args& args) {
  if (!all_dense(args.gamma, args.beta, args.mu, args.rsigma)) return kStatisticsNotDense;
  return refuse_forward(args);
}

void rmsnorm_fwd(const te_fl_context&, const te_fl_rmsnorm_fwd_args& args) {
  run_forward({args.x, args.gamma, nullptr, args.z, nullptr, args.rsigma, args.residual, args.sum,
               args.epsilon, args.zero_centered_gamma != 0});
}
Refusal refuse_rmsnorm_fwd(const te_fl_rmsnorm_fwd_args& args) {
  if (!all_dense(args.gamma, args.rsigma)) return kStatisticsNotDense;
  return refuse_forward(args);
}

// ---- backward

struct Backward {
  // Absent tensors are NULL.
  const te_fl_tensor *dz, *x, *add, *mu, *rsigma, *gamma, *dx, *dgamma, *dbeta;
  bool zero_centered_gamma;
};

void run_backward(const Backward& args) {
  const Matrix matrix = backend::as_matrix(*args.x);
  const int64_t cols = matrix.cols;
  const Rows dz(*args.dz), x(*args.x), add(args.add != nullptr ? *args.add : *args.x), dx(*args.dx);
  const auto gamma = load_gamma(*args.gamma, args.zero_centered_gamma);
  const float* mu = args.mu != nullptr ? backend::data<const float>(*args.mu) : nullptr;
  const float* rsigma = backend::data<const float>(*args.rsigma);
  ColumnSums dgamma(cols), dbeta(cols);
  const Parts parts(matrix.rows, grain_of_rows(cols));
  dgamma.start(parts.count());
  if (args.dbeta != nullptr) dbeta.start(parts.count());
  // Number of rows whose FP32 sums are accumulated before they are added to the FP64 sums.
  constexpr int64_t kRowsToFold = 8;
  const RowBuffers buffers(cols, 5);
  const bool stream = exceeds_cache(matrix.rows * dx.pitch);
  const float inverse = 1.0f / static_cast<float>(std::max<int64_t>(cols, 1));
  parts.run([&](int64_t part, int64_t begin, int64_t end) {
    float* dz_row = buffers.row(part, 0);
    float* x_row = buffers.row(part, 1);
    float* add_row = args.add != nullptr ? buffers.row(part, 2) : nullptr;
    float* dgamma_rows = buffers.row(part, 3);
    float* dbeta_rows = args.dbeta != nullptr ? buffers.row(part, 4) : nullptr;
    const auto fold = [&] {
      dgamma.add(part, 0, cols, dgamma_rows);
      if (dbeta_rows != nullptr) dbeta.add(part, 0, cols, dbeta_rows);
    };
    for (int64_t row = begin; row < end; ++row) {
      if ((row - begin) % kRowsToFold == 0) {
        if (row > begin) fold();
        std::fill_n(dgamma_rows, padded(cols), 0.0f);
        if (dbeta_rows != nullptr) std::fill_n(dbeta_rows, padded(cols), 0.0f);
      }
      dz.load(row, cols, dz_row);
      x.load(row, cols, x_row);
      if (add_row != nullptr) add.load(row, cols, add_row);
      const float mean = mu != nullptr ? mu[row] : 0.0f;
      const NormSums sums =
          norm_sums(dz_row, x_row, gamma.data(), cols, mean, rsigma[row], dgamma_rows, dbeta_rows);
      norm_gradient(dz_row, x_row, gamma.data(), add_row, cols, mean, rsigma[row],
                    mu != nullptr ? sums.d * inverse : 0.0f, sums.dn * inverse, dz_row);
      store_f32(dx.dtype, dz_row, cols, dx.data + row * dx.pitch, stream);
    }
    if (end > begin) fold();
    store_fence();
  });
  dgamma.store(*args.dgamma);
  if (args.dbeta != nullptr) dbeta.store(*args.dbeta);
}

void layernorm_bwd(const te_fl_context&, const te_fl_layernorm_bwd_args& args) {
  run_backward({args.dz, args.x, args.add, args.mu, args.rsigma, args.gamma, args.dx, args.dgamma,
                args.dbeta, args.zero_centered_gamma != 0});
}
void rmsnorm_bwd(const te_fl_context&, const te_fl_rmsnorm_bwd_args& args) {
  run_backward({args.dz, args.x, nullptr, nullptr, args.rsigma, args.gamma, args.dx, args.dgamma,
                nullptr, args.zero_centered_gamma != 0});
}
void rmsnorm_bwd_add(const te_fl_context&, const te_fl_rmsnorm_bwd_add_args& args) {
  run_backward({args.dz, args.x, args.add, nullptr, args.rsigma, args.gamma, args.dx, args.dgamma,
                nullptr, args.zero_centered_gamma != 0});
}

template <class Args>
Refusal refuse_backward(const Args& args, const te_fl_tensor* add) {
  if (!all_dense(args.dz, args.x, args.dx, add)) return kNotContiguous;
  if (add != nullptr && overlaps_askew(*args.dx, *add)) return kOverlaps;
  if (!all_dense(args.rsigma, args.gamma, args.dgamma)) return kStatisticsNotDense;
  if (overlaps_askew(*args.dx, *args.dz) || overlaps(*args.dx, *args.x)) return kOverlaps;
  return nullptr;
}
Refusal refuse_layernorm_bwd(const te_fl_layernorm_bwd_args& args) {
  return all_dense(args.mu, args.dbeta) ? refuse_backward(args, args.add) : kStatisticsNotDense;
}
Refusal refuse_rmsnorm_bwd(const te_fl_rmsnorm_bwd_args& args) {
  return refuse_backward(args, nullptr);
}
Refusal refuse_rmsnorm_bwd_add(const te_fl_rmsnorm_bwd_add_args& args) {
  return refuse_backward(args, args.add);
}

}  // namespace

void append_norm(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(
      descriptor<te_fl_layernorm_fwd_args, layernorm_fwd, refuse_layernorm_fwd>("layernorm_fwd"));
  ops.back().later_args = "residual sum";
  ops.push_back(
      descriptor<te_fl_layernorm_bwd_args, layernorm_bwd, refuse_layernorm_bwd>("layernorm_bwd"));
  ops.back().later_args = "add";
  ops.push_back(descriptor<te_fl_rmsnorm_fwd_args, rmsnorm_fwd, refuse_rmsnorm_fwd>("rmsnorm_fwd"));
  ops.back().later_args = "residual sum";
  ops.push_back(descriptor<te_fl_rmsnorm_bwd_args, rmsnorm_bwd, refuse_rmsnorm_bwd>("rmsnorm_bwd"));
  ops.push_back(descriptor<te_fl_rmsnorm_bwd_add_args, rmsnorm_bwd_add, refuse_rmsnorm_bwd_add>(
      "rmsnorm_bwd_add"));
}

}  // namespace te_fl::cpu
