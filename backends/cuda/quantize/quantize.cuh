// Shared by the kernels and ops of quantisation.
#pragma once

#include "common/elementwise.cuh"
#include "common/overlap.hpp"
#include "plugin/families.hpp"
#include "quantize/quantize_choice.hpp"
#include "te_fl/backend/describe.hpp"

namespace te_fl::cuda {

inline constexpr const char* kInPlace = "the output shares memory with the input";

struct Copy {
  static constexpr int kSources = 1, kOutputs = 1;
  static constexpr bool kSelfScaled = true, kCopies = true;
  __device__ void operator()(const float (&x)[1], float (&v)[1]) const { v[0] = x[0]; }
};

inline float largest_finite_of(int dtype) {
  return dtype == TE_FL_F16 ? 65504.0f : dtype == TE_FL_BF16 ? 3.38953139e38f : FLT_MAX;
}
inline const float* find_noop(const te_fl_tensor* flag) {
  return flag == nullptr ? nullptr : backend::data<const float>(*flag);
}

// Returns the elementwise op that copies (quantises) rows of `input`, from first_row on, to
// `output`.
inline Elementwise<Copy> make_copy(const te_fl_tensor& input, int64_t first_row,
                                 const te_fl_tensor& output) {
  const int64_t cols = backend::as_matrix(output).cols;
  return {{{Source(input), first_row * cols, cols}}, {}};
}
void quantize_rows(const te_fl_context& ctx, const te_fl_tensor& input, int64_t first_row,
                   const te_fl_tensor& output, const float* noop);

// Implements the descriptor's describe().
template <class Args>
std::string describe_choice(const te_fl_context&, const Args& args) {
  return choose_quantize(args).text();
}
template <class Args>
constexpr auto kDescribe = backend::describe_thunk<Args, describe_choice<Args>>;

inline Refusal refuse_pair(const te_fl_tensor& input, const te_fl_tensor& output) {
  if (!dense(&input)) return kNotContiguous;
  return overlaps(output, input) ? kInPlace : refuse_output(output);
}

}  // namespace te_fl::cuda
