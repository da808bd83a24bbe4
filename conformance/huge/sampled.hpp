#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "te_fl/te_fl.hpp"

// Tensors too large for a host-side oracle: their contents repeat a short table, so that any
// element is known, and results are read back in small windows.
namespace te_fl::huge {

// The value that element i of an input has, exact in BF16: normally distributed, or positive and at
// least 0.5. The period is prime, so rows differ.
class Pattern {
 public:
  static constexpr int64_t kPeriod = 1000003;
  explicit Pattern(uint32_t seed, bool positive = false);
  float at(int64_t i) const { return values_[static_cast<size_t>(i % kPeriod)]; }
  const std::vector<float>& values() const { return values_; }

 private:
  std::vector<float> values_;
};

// The value that element i of a tensor is to have.
using Value = std::function<double(int64_t)>;
// Its value, and how far off it may be.
struct Near {
  double value, slack;
};
using NearValue = std::function<Near(int64_t)>;

// One op at one size. A mistake is described in `failure`.
class Run {
 public:
  Run(Device device, int64_t elements, std::string impl = {})
      : device_(device), elements_(elements), impl_(std::move(impl)) {}

  Device device() const { return device_; }
  int64_t elements() const { return elements_; }  // of the largest tensor, at least
  // The rows of `cols` elements that elements() need, rounded up to `multiple`.
  int64_t rows(int64_t cols, int64_t multiple = 16) const {
    const int64_t rows = (elements_ + cols - 1) / cols;
    return (rows + multiple - 1) / multiple * multiple;
  }
  const std::string& impl() const { return impl_; }  // the implementation that is meant; "": any
  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  void fail(const std::string& why) {
    if (failure_.empty()) failure_ = why;
  }

  // A run that went wrong is as it should be, and one that did not is not.
  void expect_failure() {
    const bool failed_before = failed();
    failure_ = failed_before ? "" : "a wrong element was not noticed";
  }

  // BF16 with the pattern's values; F32 likewise.
  Tensor input(const Shape& shape, const Pattern& pattern, DType dtype = DType::kBF16);
  Tensor output(const Shape& shape, DType dtype = DType::kBF16);
  Tensor integers(const std::vector<int32_t>& values);  // I32 [n]
  // Writes the pattern to a contiguous BF16 or F32 tensor that is there.
  void fill(const Tensor& tensor, const Pattern& pattern);
  // Writes `period` again and again to a contiguous tensor; its length is whole elements.
  void repeat(const Tensor& tensor, const std::vector<uint8_t>& period);
  void set(const Tensor& tensor, int64_t index, float value);  // one element
  // From now on one element of everything that is read is wrong.
  void spoil() { spoils_ = true; }
  // Elements [begin, begin + count) as floats: E4M3 decoded without a scale, U8 as numbers.
  std::vector<float> read(const Tensor& tensor, int64_t begin, int64_t count);
  // Runs the op and waits.
  void call(const char* op, const void* args, const te_fl_rng& rng = {});
  // Elements that are looked at: both ends, around 2^31 elements and 2^32 bytes, and some between.
  std::vector<int64_t> windows(int64_t total, int64_t length = kWindow) const;
  static constexpr int64_t kWindow = 4096;
  // Compares windows of `tensor` with want(i): |found - want| <= relative |want| + absolute. Two
  // roundings to BF16 unless told.
  void expect(const Tensor& tensor, const char* name, const Value& want, double relative = 0x1p-8,
              double absolute = 1e-6);
  // Windows of `length`: where every element costs the oracle a row, few do.
  void expect_near(const Tensor& tensor, const char* name, const NearValue& want,
                   int64_t length = kWindow);
  static constexpr int64_t kFew = 64;
  // Compares some of the `cols` sums over `rows` rows of value(row * cols + col), to 1e-5 of the
  // sum of magnitudes.
  void expect_sums(const Tensor& sums, const char* name, int64_t rows, int64_t cols,
                   const Value& value);

 private:
  Device device_;
  int64_t elements_;
  std::string impl_, failure_;
  bool spoils_ = false;
};

}  // namespace te_fl::huge
