// The scaled softmax ops: unmasked, with a mask tensor, upper-triangular and aligned causal.
#include "te_fl/ops/softmax.h"

#include <cmath>
#include <vector>

#include "element.hpp"
#include "families.hpp"
#include "row_max.hpp"
#include "te_fl/attention.hpp"

namespace te_fl::reference {
namespace {

using backend::Matrix;

// The query of row `row` of a [.., queries, keys] tensor of scores.
int64_t query_of(const te_fl_tensor& t, int64_t row) { return row % t.dl.shape[t.dl.ndim - 2]; }

// The number of leading keys that a query sees.
struct AllKeys {
  int64_t keys;
  int64_t operator()(int64_t) const { return keys; }
};
// Aligned at the bottom right. With as many keys as queries this is the upper-triangular mask.
struct CausalKeys {
  int64_t queries;
  int64_t keys;
  int64_t operator()(int64_t query) const {
    const int64_t visible = query + keys - queries + 1;
    return visible < 0 ? 0 : visible;
  }
};

CausalKeys causal_keys(const te_fl_tensor& t) {
  return {t.dl.shape[t.dl.ndim - 2], t.dl.shape[t.dl.ndim - 1]};
}

// Writes the softmax of x * scale over the unmasked keys below `visible`, and 0 for other keys.
template <class Masked>
void softmax_row(const double* x, int64_t visible, double scale, Masked&& masked, float* y) {
  double top = -INFINITY;
  for (int64_t k = 0; k < visible; ++k) {
    if (!masked(k)) top = max_or_nan(top, scale * x[k]);
  }
  if (top == -INFINITY) return;  // the row is fully masked
  double sum = 0;
  for (int64_t k = 0; k < visible; ++k) {
    if (!masked(k)) sum += std::exp(scale * x[k] - top);
  }
  for (int64_t k = 0; k < visible; ++k) {
    if (!masked(k)) y[k] = static_cast<float>(std::exp(scale * x[k] - top) / sum);
  }
}

template <class Visible, class Masked>
void forward(const te_fl_tensor& input, const te_fl_tensor& output, float scale, Visible visible,
             Masked masked) {
  const Matrix m = backend::as_matrix(input);
  const std::vector<double> x = Reader(input).all_double();
  std::vector<float> y(x.size(), 0.0f);
  for (int64_t r = 0; r < m.rows; ++r) {
    softmax_row(
        x.data() + r * m.cols, visible(query_of(input, r)), scale,
        [&](int64_t k) { return masked(r, k); }, y.data() + r * m.cols);
  }
  store_output(output, y.data());
}

constexpr auto kNoMask = [](int64_t, int64_t) { return false; };

template <class Visible>
void backward(const te_fl_softmax_bwd4_args& a, Visible visible) {
  const Matrix m = backend::as_matrix(*a.output_grad);
  const std::vector<double> dy = Reader(*a.output_grad).all_double();
  const std::vector<double> y = Reader(*a.softmax_results).all_double();
  std::vector<float> dx(dy.size(), 0.0f);
  for (int64_t r = 0; r < m.rows; ++r) {
    const int64_t begin = r * m.cols;
    const int64_t end = begin + visible(query_of(*a.output_grad, r));
    double dot = 0;
    for (int64_t i = begin; i < end; ++i) dot += dy[i] * y[i];
    for (int64_t i = begin; i < end; ++i) {
      dx[i] = static_cast<float>(static_cast<double>(a.scale) * y[i] * (dy[i] - dot));
    }
  }
  store_output(*a.input_grad, dx.data());
}

void scaled_forward(const te_fl_context&, const te_fl_scaled_softmax_forward_args& a) {
  forward(*a.input, *a.output, a.scale, AllKeys{a.input->dl.shape[3]}, kNoMask);
}

void masked_forward(const te_fl_context&, const te_fl_scaled_masked_softmax_forward_args& a) {
  const int64_t* shape = a.input->dl.shape;
  const auto* mask = backend::data<const uint8_t>(*a.mask);
  forward(*a.input, *a.output, a.scale, AllKeys{shape[3]}, [&](int64_t row, int64_t k) {
    const int64_t head = row / shape[2];
    return mask[backend::broadcast_offset(*a.mask, head / shape[1], head % shape[1], row % shape[2],
                                          k)] != 0;
  });
}

void triangular_forward(const te_fl_context&,
                        const te_fl_scaled_upper_triang_masked_softmax_forward_args& a) {
  forward(*a.input, *a.output, a.scale, causal_keys(*a.input), kNoMask);
}

void aligned_forward(const te_fl_context&,
                     const te_fl_scaled_aligned_causal_masked_softmax_forward_args& a) {
  forward(*a.input, *a.output, a.scale, causal_keys(*a.input), kNoMask);
}

void full_backward(const te_fl_context&, const te_fl_softmax_bwd4_args& a) {
  backward(a, AllKeys{a.output_grad->dl.shape[3]});
}

void aligned_backward(const te_fl_context&, const te_fl_softmax_bwd4_args& a) {
  backward(a, causal_keys(*a.output_grad));
}

void triangular_backward(const te_fl_context&,
                         const te_fl_scaled_upper_triang_masked_softmax_backward_args& a) {
  te_fl_softmax_bwd4_args same;
  same.output_grad = a.output_grad;
  same.softmax_results = a.softmax_results;
  same.input_grad = a.input_grad;
  same.scale = a.scale;
  backward(same, causal_keys(*a.output_grad));
}

}  // namespace

void append_softmax(std::vector<te_fl_op_desc>& ops) {
  using Fwd4 = te_fl_softmax_fwd4_args;
  using Bwd4 = te_fl_softmax_bwd4_args;
  using Masked = te_fl_scaled_masked_softmax_forward_args;
  using Fwd3 = te_fl_scaled_upper_triang_masked_softmax_forward_args;
  using Bwd3 = te_fl_scaled_upper_triang_masked_softmax_backward_args;
  ops.push_back(descriptor<Fwd4, scaled_forward>("scaled_softmax_forward"));
  ops.push_back(descriptor<Bwd4, full_backward>("scaled_softmax_backward"));
  ops.push_back(descriptor<Masked, masked_forward>("scaled_masked_softmax_forward"));
  ops.push_back(descriptor<Bwd4, full_backward>("scaled_masked_softmax_backward"));
  ops.push_back(descriptor<Fwd3, triangular_forward>("scaled_upper_triang_masked_softmax_forward"));
  ops.push_back(
      descriptor<Bwd3, triangular_backward>("scaled_upper_triang_masked_softmax_backward"));
  ops.push_back(descriptor<Fwd4, aligned_forward>("scaled_aligned_causal_masked_softmax_forward"));
  ops.push_back(
      descriptor<Bwd4, aligned_backward>("scaled_aligned_causal_masked_softmax_backward"));
}

}  // namespace te_fl::reference
