#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "te_fl/te_fl.hpp"

// Tests with tensors that are too large for a host-side oracle. Their contents repeat a short
// table, so every element is known; results are compared in small windows.
namespace te_fl::huge {

// The values of an input. Element i is exact in BF16 and normally distributed, or positive and at
// least 0.5. The period is prime, so that rows differ.
class Pattern {
 public:
  static constexpr int64_t kPeriod = 1000003;
  explicit Pattern(uint32_t seed, bool positive = false);
  float at(int64_t i) const { return values_[static_cast<size_t>(i % kPeriod)]; }
  const std::vector<float>& values() const { return values_; }

 private:
  std::vector<float> values_;
};

// The expected value of element i.
using Value = std::function<double(int64_t)>;
// An expected value and its tolerance.
struct Near {
  double value, tolerance;
};
using NearValue = std::function<Near(int64_t)>;

// A test of one op at one size. After a failure, failure() returns its description.
class Run {
 public:
  Run(Device device, int64_t elements, std::string impl = {})
      : device_(device), elements_(elements), impl_(std::move(impl)) {}

  Device device() const { return device_; }
  int64_t elements() const { return elements_; }  // at least, of the largest tensor
  // The number of rows of `cols` elements that gives at least elements(), rounded up to `multiple`.
  int64_t rows(int64_t cols, int64_t multiple = 16) const {
    const int64_t rows = (elements_ + cols - 1) / cols;
    return (rows + multiple - 1) / multiple * multiple;
  }
  const std::string& impl() const { return impl_; }  // the implementation under test; "": any
  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  void fail(const std::string& why) {
    if (failure_.empty()) failure_ = why;
  }

  // Inverts the result, for self-checks in which a failure is expected.
  void expect_failure() {
    const bool failed_before = failed();
    failure_ = failed_before ? "" : "a wrong element was not detected";
  }

  // A BF16 or F32 tensor with the pattern's values.
  Tensor input(const Shape& shape, const Pattern& pattern, DType dtype = DType::kBF16);
  Tensor output(const Shape& shape, DType dtype = DType::kBF16);
  Tensor integers(const std::vector<int32_t>& values);  // makes an I32 tensor [n]
  // Writes the pattern to an existing contiguous BF16 or F32 tensor.
  void fill(const Tensor& tensor, const Pattern& pattern);
  // Fills a contiguous tensor with repetitions of `period`, which consists of complete elements.
  void repeat(const Tensor& tensor, const std::vector<uint8_t>& period);
  void set(const Tensor& tensor, int64_t index, float value);  // sets one element
  // Makes each later read() return one wrong element, for self-checks.
  void spoil() { spoils_ = true; }
  // Elements [begin, begin + count) as floats. E4M3 is decoded without a scale; U8 gives its
  // numbers.
  std::vector<float> read(const Tensor& tensor, int64_t begin, int64_t count);
  // Runs the op and waits for it.
  void call(const char* op, const void* args, const te_fl_rng& rng = {});
  // Returns the start indices of the windows that are compared: at both ends, around 2^31 elements
  // and 2^32 bytes, and some between.
  std::vector<int64_t> windows(int64_t total, int64_t length = kWindow) const;
  static constexpr int64_t kWindow = 4096;
  // Compares windows of `tensor` with want(i): |found - want| <= relative |want| + absolute. The
  // default allows two roundings to BF16.
  void expect(const Tensor& tensor, const char* name, const Value& want, double relative = 0x1p-8,
              double absolute = 1e-6);
  // Like expect(), with a tolerance for each element and windows of `length`; use kFew if the
  // oracle needs a complete row for each element.
  void expect_near(const Tensor& tensor, const char* name, const NearValue& want,
                   int64_t length = kWindow);
  static constexpr int64_t kFew = 64;
  // Compares some of the `cols` column sums over `rows` rows of value(row * cols + col), with a
  // tolerance of 1e-5 of the sum of magnitudes.
  void expect_sums(const Tensor& sums, const char* name, int64_t rows, int64_t cols,
                   const Value& value);

 private:
  Device device_;
  int64_t elements_;
  std::string impl_, failure_;
  bool spoils_ = false;
};

}  // namespace te_fl::huge
