// Text for te_fl_op_desc.describe (rule R31) of a MoE op that always runs the same kernels: their
// names in order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "te_fl/backend/describe.hpp"

namespace te_fl::cuda {

template <size_t N>
struct KernelNames {
  // NOLINTNEXTLINE: converts implicitly, so that a string literal can be a template argument.
  constexpr KernelNames(const char (&names)[N]) { std::copy_n(names, N, text); }
  char text[N] = {};
};

template <class Args, KernelNames kNames>
std::string kernel_names(const te_fl_context&, const Args&) {
  return kNames.text;
}

template <class Args, KernelNames kNames>
constexpr auto describe_by = backend::describe_thunk<Args, kernel_names<Args, kNames>>;

}  // namespace te_fl::cuda
