#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "te_fl/te_fl.hpp"

// Tensors too large for a host-side oracle: their contents repeat a short table, so that any
// element is known, and results are read back in small windows.
namespace te_fl::conformance::huge {

// The value that element i of an input has, exact in BF16. The period is prime, so rows differ.
class Pattern {
 public:
  static constexpr int64_t kPeriod = 1000003;
  explicit Pattern(uint32_t seed);
  float at(int64_t i) const { return values_[static_cast<size_t>(i % kPeriod)]; }
  const std::vector<float>& values() const { return values_; }

 private:
  std::vector<float> values_;
};

// One op at one size. A mistake is described in `failure`.
class Run {
 public:
  Run(Device device, int64_t elements) : device_(device), elements_(elements) {}

  Device device() const { return device_; }
  int64_t elements() const { return elements_; }  // of the largest tensor, at least
  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  void fail(const std::string& why) {
    if (failure_.empty()) failure_ = why;
  }

  // BF16 with the pattern's values; F32 likewise.
  Tensor input(const Shape& shape, const Pattern& pattern, DType dtype = DType::kBF16);
  Tensor output(const Shape& shape, DType dtype = DType::kBF16);
  void set(const Tensor& tensor, int64_t index, float value);  // one element
  // Elements [begin, begin + count) as floats; codes (U8) as numbers.
  std::vector<float> read(const Tensor& tensor, int64_t begin, int64_t count);
  // Runs the op and waits.
  void call(const char* op, const void* args, const te_fl_rng& rng = {0, 0, nullptr});
  // Elements that are looked at: both ends, around 2^31 elements and 2^32 bytes, and some between.
  std::vector<int64_t> windows(int64_t total) const;
  static constexpr int64_t kWindow = 4096;
  // Compares windows of `tensor` with want(i), allowing slack(want) beside one rounding to BF16.
  void expect(const Tensor& tensor, const char* name, const std::function<double(int64_t)>& want,
              double relative = 0x1p-8, double absolute = 1e-6);

 private:
  Device device_;
  int64_t elements_;
  std::string failure_;
};

}  // namespace te_fl::conformance::huge
