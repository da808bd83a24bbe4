#include "reduce.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "te_fl/backend.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/ops/collective.h"

namespace te_fl::gloo_ranks {
namespace {

template <class F>
void visit(Element element, F&& f) {
  switch (element) {
    case Element::kF64:
      return f(std::type_identity<double>{});
    case Element::kF32:
      return f(std::type_identity<float>{});
    case Element::kF16:
      return f(std::type_identity<numeric::half>{});
    case Element::kBF16:
      return f(std::type_identity<numeric::bfloat16>{});
    case Element::kI64:
      return f(std::type_identity<int64_t>{});
    case Element::kI32:
      return f(std::type_identity<int32_t>{});
  }
}

template <class T>
constexpr bool kIsHalf = !std::is_arithmetic_v<T>;
template <class T>
using Wide = std::conditional_t<kIsHalf<T>, float, T>;

template <class T>
Wide<T> widen(T value) {
  if constexpr (kIsHalf<T>) {
    return numeric::to_float(value);
  } else {
    return value;
  }
}
template <class T>
T narrow(Wide<T> value) {
  if constexpr (kIsHalf<T>) {
    return numeric::from_float<T>(value);
  } else {
    return value;
  }
}

template <class T>
T sum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}
template <class T>
T larger(T a, T b) {
  return a != a || a >= b ? a : b;  // NaN is kept
}

template <class T, T (*F)(T, T)>
void pairs(void* out, const void* a, const void* b, size_t n) {
  auto* z = static_cast<T*>(out);
  const auto* x = static_cast<const T*>(a);
  const auto* y = static_cast<const T*>(b);
  for (size_t i = 0; i < n; ++i) z[i] = F(x[i], y[i]);
}

template <class T, Wide<T> (*F)(Wide<T>, Wide<T>)>
void reduce_run(const char* const* parts, int ranks, size_t begin, size_t n, bool mean, T* out) {
  Wide<T> values[512];
  const auto part = [&](int r) { return reinterpret_cast<const T*>(parts[r]) + begin; };
  for (size_t i = 0; i < n; ++i) values[i] = widen(part(0)[i]);
  for (int r = 1; r < ranks; ++r) {
    for (size_t i = 0; i < n; ++i) values[i] = F(values[i], widen(part(r)[i]));
  }
  for (size_t i = 0; mean && i < n; ++i) values[i] /= static_cast<Wide<T>>(ranks);
  for (size_t i = 0; i < n; ++i) out[begin + i] = narrow<T>(values[i]);
}

}  // namespace

Element to_element(te_fl_dtype dtype) {
  constexpr uint8_t kInt = 0, kFloat = 2;  // DLPack's type codes; the remaining one is bfloat16's
  if (dtype.code == kInt) return dtype.bits == 64 ? Element::kI64 : Element::kI32;
  if (dtype.code != kFloat) return Element::kBF16;
  if (dtype.bits == 64) return Element::kF64;
  return dtype.bits == 32 ? Element::kF32 : Element::kF16;
}

size_t bytes_of(Element element) noexcept {
  size_t bytes = 0;
  visit(element, [&](auto type) { bytes = sizeof(typename decltype(type)::type); });
  return bytes;
}

bool is_half(Element element) noexcept {
  return element == Element::kF16 || element == Element::kBF16;
}

Reduce pairwise(Element element, int32_t reduction) {
  Reduce f = nullptr;
  visit(element, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (!kIsHalf<T>)
      f = reduction == TE_FL_REDUCTION_MAX ? pairs<T, larger<T>> : pairs<T, sum<T>>;
  });
  return f;
}

void divide(Element element, void* values, size_t n, int ranks) {
  visit(element, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (!kIsHalf<T>) {
      for (size_t i = 0; i < n; ++i) static_cast<T*>(values)[i] /= static_cast<T>(ranks);
    }
  });
}

void reduce_parts(Element element, int32_t reduction, const char* const* parts, int ranks, size_t n,
                  char* out) {
  visit(element, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool mean = reduction == TE_FL_REDUCTION_AVG;
    for (size_t begin = 0; begin < n; begin += 512) {
      const size_t count = std::min<size_t>(512, n - begin);
      auto* to = reinterpret_cast<T*>(out);
      if (reduction == TE_FL_REDUCTION_MAX) {
        reduce_run<T, larger<Wide<T>>>(parts, ranks, begin, count, false, to);
      } else {
        reduce_run<T, sum<Wide<T>>>(parts, ranks, begin, count, mean, to);
      }
    }
  });
}

}  // namespace te_fl::gloo_ranks
