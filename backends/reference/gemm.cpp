// generic_gemm and grouped_gemm: exact dequantised operands, double accumulators, one rounding to
// FP32 and one to the output's dtype.
//
// For an operand with block scaling, the row-wise or column-wise data is read whose blocks run
// along K: row-wise for an operand stored as [.., K], column-wise for one stored as [K, ..]. If
// that data does not exist, the other is read. Backends on hardware that multiplies block by block
// must do the same.
#include "te_fl/ops/gemm.h"

#include "activation.hpp"
#include "element.hpp"
#include "families.hpp"
#include "te_fl/backend/grouped_gemm.hpp"

namespace te_fl::reference {
namespace {

// Returns the operand as a row-major matrix. `transpose`: transposes the stored matrix.
std::vector<double> operand(const te_fl_tensor& t, bool transpose, Copy copy) {
  std::vector<double> stored = Reader(t, copy).all_double();
  if (!transpose) return stored;
  const backend::Matrix m = backend::as_matrix(t);
  std::vector<double> result(stored.size());
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t c = 0; c < m.cols; ++c) result[c * m.rows + r] = stored[r * m.cols + c];
  }
  return result;
}

// Computes row[n] = sum over k of a[k] b[k, n], with k ascending. The inner loop runs over n, that
// is, over independent sums, so vectorisation does not change the results.
void multiply_row(const double* a, const double* b, int64_t k_extent, int64_t n_extent,
                  double* row) {
  std::fill_n(row, n_extent, 0.0);
  for (int64_t k = 0; k < k_extent; ++k) {
    const double factor = a[k];
    const double* b_row = b + k * n_extent;
    for (int64_t n = 0; n < n_extent; ++n) row[n] += factor * b_row[n];
  }
}

// The inputs of an epilogue. Absent inputs are empty.
struct Epilogue {
  std::vector<float> bias, pre_gelu_in, residual, previous;
};

void write_bias_grad(const te_fl_generic_gemm_args& args, const std::vector<double>& a,
                     int64_t m_extent, int64_t k_extent) {
  std::vector<float> sums(static_cast<size_t>(m_extent));
  const Reader previous(*args.bias_grad);
  for (int64_t m = 0; m < m_extent; ++m) {
    double sum = 0.0;
    for (int64_t k = 0; k < k_extent; ++k) sum += a[m * k_extent + k];
    if (args.accumulate_bias_grad) sum += previous[m];
    sums[m] = static_cast<float>(sum);
  }
  Writer(*args.bias_grad).write(0, m_extent, sums.data());
}

// Writes the column sums of the result.
void write_sums(const te_fl_tensor& out, const std::vector<float>& result, int64_t rows,
                int64_t cols) {
  std::vector<double> sums(static_cast<size_t>(cols), 0.0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) sums[c] += result[r * cols + c];
  }
  const std::vector<float> rounded(sums.begin(), sums.end());
  Writer(out).write(0, cols, rounded.data());
}

void generic_gemm(const te_fl_context&, const te_fl_generic_gemm_args& args) {
  const backend::Matrix d = backend::as_matrix(*args.d);
  const backend::Matrix stored_a = backend::as_matrix(*args.a);
  const int64_t k_extent = args.trans_a ? stored_a.rows : stored_a.cols;
  const std::vector<double> a =
      operand(*args.a, args.trans_a != 0, args.trans_a ? Copy::kColumnwise : Copy::kRowwise);
  const std::vector<double> b =
      operand(*args.b, args.trans_b != 0, args.trans_b ? Copy::kRowwise : Copy::kColumnwise);
  Epilogue epilogue;
  if (args.bias != nullptr) epilogue.bias = Reader(*args.bias).all();
  if (args.pre_gelu_in != nullptr) {
    epilogue.pre_gelu_in = Reader(*args.pre_gelu_in).all();
  }
  if (args.residual != nullptr) epilogue.residual = Reader(*args.residual).all();
  // As in BLAS, d is not read if beta is 0.
  if (args.accumulate && args.beta != 0.0f) epilogue.previous = Reader(*args.d).all();

  std::vector<float> result(static_cast<size_t>(d.rows * d.cols));
  std::vector<float> pre_gelu(args.pre_gelu_out != nullptr ? result.size() : 0);
  std::vector<double> row(d.rows == 0 ? 0 : static_cast<size_t>(d.cols));
  for (int64_t m = 0; m < d.rows; ++m) {
    multiply_row(a.data() + m * k_extent, b.data(), k_extent, d.cols, row.data());
    for (int64_t n = 0; n < d.cols; ++n) {
      const auto i = static_cast<size_t>(m * d.cols + n);
      double value = static_cast<double>(args.alpha) * row[n];
      if (!epilogue.bias.empty()) value += epilogue.bias[n];
      if (!pre_gelu.empty()) pre_gelu[i] = static_cast<float>(value);
      if (args.gelu) value = Gelu::value(value);
      if (!epilogue.pre_gelu_in.empty()) value *= Gelu::derivative(epilogue.pre_gelu_in[i]);
      if (!epilogue.residual.empty()) value += epilogue.residual[i];
      if (!epilogue.previous.empty())
        value += static_cast<double>(args.beta) * epilogue.previous[i];
      result[i] = static_cast<float>(value);
    }
  }
  store_output(*args.d, result.data());
  if (args.pre_gelu_out != nullptr) store_output(*args.pre_gelu_out, pre_gelu.data());
  if (args.bias_grad != nullptr) write_bias_grad(args, a, d.rows, k_extent);
  if (args.d_sum != nullptr) write_sums(*args.d_sum, result, d.rows, d.cols);
}

void grouped_gemm(const te_fl_context& ctx, const te_fl_grouped_gemm_args& args) {
  for (int64_t i = 0; i < args.a_count; ++i) generic_gemm(ctx, backend::product_of(args, i));
}

}  // namespace

void append_gemm(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_generic_gemm_args, generic_gemm>("generic_gemm"));
  ops.back().later_args = "residual d_sum";
  ops.push_back(descriptor<te_fl_grouped_gemm_args, grouped_gemm>("grouped_gemm"));
}

}  // namespace te_fl::reference
