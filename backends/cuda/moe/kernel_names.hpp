// Words of the kernels that an op of experts runs whatever its arguments are, in their order, for
// te_fl_op_desc.describe (rule R31).
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>

#include "te_fl/backend/describe.hpp"

namespace te_fl::cuda {

template <size_t N>
struct KernelNames {
  // NOLINTNEXTLINE: a template argument is made of a literal.
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
