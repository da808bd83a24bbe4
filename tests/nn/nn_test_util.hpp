#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "te_fl/nn.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::nn::testing {

// Returns the value of a Result; throws, which fails the test, on an error.
template <class T>
T take(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().to_string());
  return std::move(result).value();
}
inline void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.to_string());
}

using Values = std::vector<double>;

// A simple random generator of uniform values in [-range, range], independent of te-fl's.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252ull) {}
  double uniform(double range = 1) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return (static_cast<double>(state_ >> 11) * 0x1p-53 * 2 - 1) * range;
  }
  int64_t below(int64_t n) {
    return static_cast<int64_t>((uniform() + 1) / 2 * static_cast<double>(n)) % n;
  }

 private:
  uint64_t state_;
};

// Returns random values that F32 (with `bf16`, BF16) holds exactly.
inline Values random_values(int64_t n, uint64_t seed, double range = 1, bool bf16 = false) {
  Random random(seed);
  Values values(static_cast<size_t>(n));
  for (double& v : values) {
    float f = static_cast<float>(random.uniform(range));
    if (bf16) {
      uint32_t bits;
      std::memcpy(&bits, &f, 4);
      bits &= 0xffff0000u;
      std::memcpy(&f, &bits, 4);
    }
    v = f;
  }
  return values;
}

inline Tensor tensor(std::initializer_list<int64_t> shape, const Values& values,
                     DType dtype = DType::kF32) {
  std::vector<float> floats(values.begin(), values.end());
  return take(Tensor::from_values(shape, floats, dtype));
}

inline Tensor int_tensor(const std::vector<int32_t>& values) {
  Tensor t = take(Tensor::empty({static_cast<int64_t>(values.size())}, DType::kI32));
  std::memcpy(t.raw_data(), values.data(), values.size() * 4);
  return t;
}

inline Tensor cu_seqlens(const std::vector<int64_t>& lengths) {
  std::vector<int32_t> sums{0};
  for (int64_t l : lengths) sums.push_back(sums.back() + static_cast<int32_t>(l));
  return int_tensor(sums);
}

inline double element(const Tensor& t, int64_t i) {
  if (t.dtype() == DType::kF32) return t.data<float>()[i];
  uint32_t bits = 0;
  if (t.dtype() == DType::kBF16) {
    bits = static_cast<uint32_t>(t.data<uint16_t>()[i]) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  throw std::runtime_error("element: dtype not handled");
}

inline Values values_of(const Tensor& t) {
  EXPECT_TRUE(t.contiguous());
  Values v(static_cast<size_t>(t.numel()));
  for (int64_t i = 0; i < t.numel(); ++i) v[static_cast<size_t>(i)] = element(t, i);
  return v;
}

inline void set_values(const Tensor& t, const Values& values) {
  ASSERT_EQ(t.dtype(), DType::kF32);
  for (int64_t i = 0; i < t.numel(); ++i) {
    t.data<float>()[i] = static_cast<float>(values[static_cast<size_t>(i)]);
  }
}

// Returns the parameter's gradient tensor, which the test may write; allocates it if there is none.
inline Tensor made_grad(const NamedParameter& p) {
  check(p.parameter->ensure_grad());
  return p.grad();
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.numel() == b.numel() &&
         std::memcmp(a.raw_data(), b.raw_data(),
                     static_cast<size_t>(bytes_for(a.dtype(), a.numel()))) == 0;
}

// Fills every F32 parameter with random values in [-range, range], so that no gradient is tiny by
// accident.
inline void randomize(Module& module, uint64_t seed, double range = 0.5) {
  for (const NamedParameter& p : module.parameters()) {
    set_values(p.value(), random_values(p.value().numel(), ++seed, range));
  }
}

inline Tensor find_state(const Module& module, const std::string& name) {
  for (const NamedTensor& t : module.state()) {
    if (t.name == name) return t.tensor;
  }
  throw std::runtime_error("no state named " + name);
}

inline double relative_l2(const Values& a, const Values& b) {
  double diff = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    diff += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(diff / norm);
}

// Values of parameters and inputs by name, in double, as the oracles read them.
using Params = std::map<std::string, Values>;
inline Params params_of(const Module& module) {
  Params params;
  for (const NamedParameter& p : module.parameters()) params[p.name] = values_of(p.value());
  return params;
}

}  // namespace te_fl::nn::testing
