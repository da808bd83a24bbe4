// Activations with a scale per row, and SiTU-GLU. This file maps elements to buffers; the
// arithmetic is in activation_kernels.cpp.
#include <vector>

#include "activation_kernels.hpp"
#include "quant_store.hpp"
#include "router_kernels.hpp"
#include "te_fl/backend/row_layouts.hpp"
#include "te_fl/ops/activation.h"

namespace te_fl::cpu {
namespace {

// A chunk buffer in which runs of columns may start at any position; it has room for the padding of
// the last run.
struct alignas(64) RunChunk {
  float data[kChunk + kPad];
};

// A decoded call. Tensors that the call does not have are NULL.
struct ScaledCall {
  Act act;
  GateOptions options;
  backend::HalvesOfRow row;
  int64_t rows, width;
  const te_fl_tensor *scales = nullptr, *grad_scales = nullptr;

  bool gated() const { return width != row.half; }
  // Calls f(column in the chunk, index in the row, number of columns) for each contiguous run of
  // a's columns [col, col + n).
  template <class F>
  void runs(int64_t col, int64_t n, F&& f) const {
    for (int64_t done = 0; done < n;) {
      const int64_t count = std::min(n - done, row.run(col + done));
      f(done, row.place_of_a(col + done), count);
      done += count;
    }
  }
  void load(const Loader& x, int64_t i, int64_t col, int64_t n, float* a, float* b) const {
    runs(col, n, [&](int64_t at, int64_t place, int64_t count) {
      x(i * width + place, count, a + at);
      if (gated()) x(i * width + place + row.distance(), count, b + at);
    });
  }
  void value(const float* a, const float* b, int64_t n, float* y) const {
    if (gated()) return gated_forward(act, options, a, b, n, y);
    act_forward(act, a, n, y);
  }
};

template <class Args>
ScaledCall make_call(const Args& a, const te_fl_tensor& narrow) {
  const backend::Matrix m = backend::as_matrix(narrow);
  ScaledCall c{Act::kSilu, {}, {m.cols, 0}, m.rows, backend::as_matrix(*a.input).cols};
  if constexpr (requires { a.beta1; }) {
    c.act = Act::kSitu, c.options.beta1 = a.beta1, c.options.beta2 = a.beta2;
  } else if constexpr (requires { a.limit; }) {
    c.act = Act::kClamped;
    c.options.limit = a.limit, c.options.alpha = a.alpha, c.options.offset = a.glu_linear_offset;
  } else if constexpr (!requires { a.glu_interleave_size; }) {
    c.act = Act::kSrelu;
  }
  if constexpr (requires { a.glu_interleave_size; }) c.row.interleave = a.glu_interleave_size;
  if constexpr (requires { a.act_scales; }) c.scales = a.act_scales;
  if constexpr (requires { a.grad_scales; }) c.grad_scales = a.grad_scales;
  return c;
}

// Element i of a tensor of scales as FP32; 1 if there is none.
float factor_of(const te_fl_tensor* scales, int64_t i) {
  if (scales == nullptr) return 1.0f;
  alignas(64) float value[kPad];
  const Loader load(*scales);
  load(i, 1, value);
  return value[0];
}

template <class Args>
void scaled_forward(const te_fl_context&, const Args& a) {
  const ScaledCall call = make_call(a, *a.output);
  const Loader x(*a.input);
  const int64_t half = call.row.half, bytes = element_bytes(*a.output);
  const int dtype = dtype_of(*a.output);
  char* const out = backend::data<char>(*a.output);
  const bool stream = exceeds_cache(call.rows * half * bytes);
  ThreadPool::instance().parallel_for(
      call.rows, grain_of_rows(call.width), [&](int64_t begin, int64_t end) {
        RunChunk first, second;
        for (int64_t i = begin; i < end; ++i) {
          const float factor = factor_of(call.scales, i);
          for (int64_t col = 0; col < half; col += kChunk) {
            const int64_t n = std::min(kChunk, half - col);
            call.load(x, i, col, n, first.data, second.data);
            call.value(first.data, second.data, n, first.data);
            if (call.scales != nullptr) scale_f32(first.data, n, factor);
            store_f32(dtype, first.data, n, out + (i * half + col) * bytes, stream);
          }
        }
        store_fence();
      });
}

template <class Args>
void scaled_backward(const te_fl_context&, const Args& a) {
  const ScaledCall call = make_call(a, *a.grad);
  const Loader x(*a.input), grad(*a.grad);
  const int64_t half = call.row.half, bytes = element_bytes(*a.output);
  const int dtype = dtype_of(*a.output);
  char* const out = backend::data<char>(*a.output);
  std::vector<float> sums(call.grad_scales != nullptr ? static_cast<size_t>(call.rows) : 0);
  ThreadPool::instance().parallel_for(
      call.rows, grain_of_rows(call.width + half), [&](int64_t begin, int64_t end) {
        RunChunk first, second, dy, values;
        for (int64_t i = begin; i < end; ++i) {
          const float factor = factor_of(call.scales, i);
          double sum = 0.0;
          for (int64_t col = 0; col < half; col += kChunk) {
            const int64_t n = std::min(kChunk, half - col);
            call.load(x, i, col, n, first.data, second.data);
            grad(i * half + col, n, dy.data);
            if (call.grad_scales != nullptr) {
              call.value(first.data, second.data, n, values.data);
              std::fill(values.data + n, values.data + padded(n), 0.0f);
              sum += dot_f32(dy.data, values.data, n);
            }
            if (call.scales != nullptr) scale_f32(dy.data, n, factor);
            if (call.gated()) {
              gated_backward(call.act, call.options, dy.data, first.data, second.data, n,
                             first.data, second.data);
            } else {
              act_backward(call.act, dy.data, first.data, n, first.data);
            }
            call.runs(col, n, [&](int64_t at, int64_t place, int64_t count) {
              char* const to = out + (i * call.width + place) * bytes;
              store_f32(dtype, first.data + at, count, to);
              if (!call.gated()) return;
              store_f32(dtype, second.data + at, count, to + call.row.distance() * bytes);
            });
          }
          if (call.grad_scales != nullptr) sums[static_cast<size_t>(i)] = static_cast<float>(sum);
        }
      });
  if (call.grad_scales == nullptr) return;
  store_f32(dtype_of(*call.grad_scales), sums.data(), call.rows,
            backend::data<char>(*call.grad_scales));
}

template <class Args>
Refusal refuse_scaled_forward(const Args& a) {
  if (!all_dense(a.input, a.output)) return kNotContiguous;
  if constexpr (requires { a.act_scales; }) {
    if (!dense(a.act_scales)) return kNotContiguous;
  }
  return overlaps(*a.output, *a.input) ? kOverlaps : nullptr;
}
template <class Args>
Refusal refuse_scaled_backward(const Args& a) {
  if (!all_dense(a.grad, a.input, a.output)) return kNotContiguous;
  if constexpr (requires { a.act_scales; }) {
    if (!all_dense(a.act_scales, a.grad_scales)) return kNotContiguous;
  }
  return overlaps(*a.output, *a.input) || overlaps(*a.output, *a.grad) ? kOverlaps : nullptr;
}

template <class Forward, class Backward>
void append_scaled(std::vector<te_fl_op_desc>& ops, const char* name, const char* gradient) {
  ops.push_back(descriptor<Forward, scaled_forward<Forward>, refuse_scaled_forward<Forward>>(name));
  ops.push_back(
      descriptor<Backward, scaled_backward<Backward>, refuse_scaled_backward<Backward>>(gradient));
}

}  // namespace

void append_scaled_activation(std::vector<te_fl_op_desc>& ops) {
  append_scaled<te_fl_situglu_args, te_fl_dsituglu_args>(ops, "situglu", "dsituglu");
  append_scaled<te_fl_scaled_swiglu_args, te_fl_scaled_dswiglu_args>(ops, "scaled_swiglu",
                                                                     "scaled_dswiglu");
  append_scaled<te_fl_scaled_clamped_swiglu_args, te_fl_scaled_clamped_dswiglu_args>(
      ops, "scaled_clamped_swiglu", "scaled_clamped_dswiglu");
  append_scaled<te_fl_scaled_srelu_args, te_fl_scaled_dsrelu_args>(ops, "scaled_srelu",
                                                                   "scaled_dsrelu");
  append_scaled<te_fl_scaled_situglu_args, te_fl_scaled_dsituglu_args>(ops, "scaled_situglu",
                                                                       "scaled_dsituglu");
}

}  // namespace te_fl::cpu
