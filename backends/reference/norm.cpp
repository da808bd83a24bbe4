// Layer and RMS normalisation. Statistics are computed in double, in two passes, and saved in FP32.
#include "te_fl/ops/norm.h"

#include <cmath>

#include "element.hpp"
#include "families.hpp"

namespace te_fl::reference {
namespace {

using backend::Matrix;

std::vector<double> weights(const te_fl_tensor& gamma, bool zero_centered) {
  std::vector<double> values = Reader(gamma).all_double();
  if (zero_centered) {
    for (double& g : values) g += 1.0;
  }
  return values;
}

double mean(double sum, int64_t n) { return n == 0 ? 0.0 : sum / static_cast<double>(n); }

// The statistics per row, for z = (x - mu) rsigma g + beta. In RMS normalisation mu is 0.
struct Statistics {
  std::vector<double> mu, rsigma;
};

Statistics row_statistics(const Reader& x, Matrix matrix, bool centered, double epsilon) {
  Statistics s{std::vector<double>(static_cast<size_t>(matrix.rows), 0.0),
               std::vector<double>(static_cast<size_t>(matrix.rows))};
  std::vector<float> row(static_cast<size_t>(matrix.cols));
  for (int64_t r = 0; r < matrix.rows; ++r) {
    x.read(r * matrix.cols, matrix.cols, row.data());
    if (centered) {
      double sum = 0.0;
      for (const float v : row) sum += v;
      s.mu[r] = mean(sum, matrix.cols);
    }
    double squares = 0.0;
    for (const float v : row) squares += (v - s.mu[r]) * (v - s.mu[r]);
    s.rsigma[r] = 1.0 / std::sqrt(mean(squares, matrix.cols) + epsilon);
  }
  return s;
}

void store_rows(const te_fl_tensor& out, const std::vector<double>& values) {
  const std::vector<float> rounded(values.begin(), values.end());
  Writer(out).write(0, static_cast<int64_t>(rounded.size()), rounded.data());
}

void normalise(const te_fl_tensor& x_tensor, const te_fl_tensor& z, const Statistics& s,
               const std::vector<double>& gamma, const std::vector<double>& beta) {
  const Reader x(x_tensor);
  const int64_t cols = backend::as_matrix(z).cols;
  store_output(z, {&x_tensor}, [&](int64_t row, int64_t col, int64_t n, float* out) {
    x.read(row * cols + col, n, out);
    for (int64_t i = 0; i < n; ++i) {
      double value = (out[i] - s.mu[row]) * s.rsigma[row] * gamma[col + i];
      if (!beta.empty()) value += beta[col + i];
      out[i] = static_cast<float>(value);
    }
  });
}

// Returns the tensor that is normalised: x or, with a residual, `sum`, to which this function first
// writes the rounded x + residual.
const te_fl_tensor& normalised_input(const te_fl_tensor& x, const te_fl_tensor* residual,
                                     const te_fl_tensor* sum) {
  if (sum == nullptr) return x;
  const Reader a(x), b(*residual);
  const int64_t cols = backend::as_matrix(x).cols;
  std::vector<float> other(static_cast<size_t>(cols));
  store_output(*sum, {&x, residual}, [&](int64_t row, int64_t col, int64_t n, float* out) {
    a.read(row * cols + col, n, out);
    b.read(row * cols + col, n, other.data());
    for (int64_t i = 0; i < n; ++i) out[i] += other[static_cast<size_t>(i)];
  });
  return *sum;
}

void layernorm_fwd(const te_fl_context&, const te_fl_layernorm_fwd_args& args) {
  const te_fl_tensor& x = normalised_input(*args.x, args.residual, args.sum);
  const Statistics s = row_statistics(Reader(x), backend::as_matrix(x), true, args.epsilon);
  const auto gamma = weights(*args.gamma, args.zero_centered_gamma != 0);
  const auto beta = args.beta != nullptr ? Reader(*args.beta).all_double() : std::vector<double>();
  normalise(x, *args.z, s, gamma, beta);
  store_rows(*args.mu, s.mu);
  store_rows(*args.rsigma, s.rsigma);
}

void rmsnorm_fwd(const te_fl_context&, const te_fl_rmsnorm_fwd_args& args) {
  const te_fl_tensor& x = normalised_input(*args.x, args.residual, args.sum);
  const Statistics s = row_statistics(Reader(x), backend::as_matrix(x), false, args.epsilon);
  normalise(x, *args.z, s, weights(*args.gamma, args.zero_centered_gamma != 0), {});
  store_rows(*args.rsigma, s.rsigma);
}

// The arguments of all norm backward ops. Absent tensors are NULL. mu NULL: RMS normalisation.
struct BackwardArgs {
  const te_fl_tensor *dz, *x, *add, *mu, *rsigma, *gamma, *dx, *dgamma, *dbeta;
  bool zero_centered_gamma;
};

void run_backward(const BackwardArgs& args) {
  const Matrix matrix = backend::as_matrix(*args.x);
  const auto rows = static_cast<size_t>(matrix.rows), cols = static_cast<size_t>(matrix.cols);
  const Reader dz(*args.dz), x(*args.x);
  const auto g = weights(*args.gamma, args.zero_centered_gamma);
  const auto rsigma = Reader(*args.rsigma).all_double();
  const auto mu =
      args.mu != nullptr ? Reader(*args.mu).all_double() : std::vector<double>(rows, 0.0);

  // Computes all sums over rows and columns first, because dx may share the memory of dz.
  std::vector<double> mean_d(rows), mean_dn(rows), dgamma(cols, 0.0), dbeta(cols, 0.0);
  std::vector<float> dz_row(cols), x_row(cols);
  for (size_t r = 0; r < rows; ++r) {
    dz.read(static_cast<int64_t>(r) * matrix.cols, matrix.cols, dz_row.data());
    x.read(static_cast<int64_t>(r) * matrix.cols, matrix.cols, x_row.data());
    double sum_d = 0.0, sum_dn = 0.0;
    for (size_t c = 0; c < cols; ++c) {
      const double n = (x_row[c] - mu[r]) * rsigma[r];
      const double d = dz_row[c] * g[c];
      sum_d += d;
      sum_dn += d * n;
      dgamma[c] += dz_row[c] * n;
      dbeta[c] += dz_row[c];
    }
    mean_d[r] = args.mu != nullptr ? mean(sum_d, matrix.cols) : 0.0;
    mean_dn[r] = mean(sum_dn, matrix.cols);
  }
  const Produce dx = [&](int64_t row, int64_t col, int64_t n, float* out) {
    std::vector<float> x_part(static_cast<size_t>(n)), add_part(static_cast<size_t>(n), 0.0f);
    const int64_t begin = row * matrix.cols + col;
    dz.read(begin, n, out);
    x.read(begin, n, x_part.data());
    if (args.add != nullptr) Reader(*args.add).read(begin, n, add_part.data());
    for (int64_t i = 0; i < n; ++i) {
      const double normalised = (x_part[i] - mu[row]) * rsigma[row];
      const double d = out[i] * g[col + i];
      const double value = rsigma[row] * (d - mean_d[row] - normalised * mean_dn[row]);
      out[i] = static_cast<float>(args.add != nullptr ? value + add_part[i] : value);
    }
  };
  store_output(*args.dx, {args.dz, args.x, args.add}, dx);
  store_rows(*args.dgamma, dgamma);
  if (args.dbeta != nullptr) store_rows(*args.dbeta, dbeta);
}

void layernorm_bwd(const te_fl_context&, const te_fl_layernorm_bwd_args& args) {
  run_backward({.dz = args.dz,
                .x = args.x,
                .add = args.add,
                .mu = args.mu,
                .rsigma = args.rsigma,
                .gamma = args.gamma,
                .dx = args.dx,
                .dgamma = args.dgamma,
                .dbeta = args.dbeta,
                .zero_centered_gamma = args.zero_centered_gamma != 0});
}

template <class Args>
void rms_backward(const Args& args, const te_fl_tensor* add) {
  run_backward({.dz = args.dz,
                .x = args.x,
                .add = add,
                .mu = nullptr,
                .rsigma = args.rsigma,
                .gamma = args.gamma,
                .dx = args.dx,
                .dgamma = args.dgamma,
                .dbeta = nullptr,
                .zero_centered_gamma = args.zero_centered_gamma != 0});
}

void rmsnorm_bwd(const te_fl_context&, const te_fl_rmsnorm_bwd_args& args) {
  rms_backward(args, nullptr);
}
void rmsnorm_bwd_add(const te_fl_context&, const te_fl_rmsnorm_bwd_add_args& args) {
  rms_backward(args, args.add);
}

}  // namespace

void append_norm(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_layernorm_fwd_args, layernorm_fwd>("layernorm_fwd"));
  ops.back().later_args = "residual sum";
  ops.push_back(descriptor<te_fl_layernorm_bwd_args, layernorm_bwd>("layernorm_bwd"));
  ops.back().later_args = "add";
  ops.push_back(descriptor<te_fl_rmsnorm_fwd_args, rmsnorm_fwd>("rmsnorm_fwd"));
  ops.back().later_args = "residual sum";
  ops.push_back(descriptor<te_fl_rmsnorm_bwd_args, rmsnorm_bwd>("rmsnorm_bwd"));
  ops.push_back(descriptor<te_fl_rmsnorm_bwd_add_args, rmsnorm_bwd_add>("rmsnorm_bwd_add"));
}

}  // namespace te_fl::reference
