#include "conformance/huge/sampled.hpp"

#include <algorithm>
#include <cstring>
#include <random>

#include "te_fl/numeric.hpp"

namespace te_fl::huge {

namespace {

int64_t bytes_of(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kI32 ? 4 : dtype == DType::kBF16 ? 2 : 1;
}

}  // namespace

Pattern::Pattern(uint32_t seed, bool positive) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < kPeriod; ++i) {
    const float drawn = normal(engine), value = positive ? std::fabs(drawn) + 0.5f : drawn;
    values_.push_back(numeric::bf16_to_float(numeric::float_to_bf16(value)));
  }
}

Tensor Run::input(const Shape& shape, const Pattern& pattern, DType dtype) {
  Tensor t = output(shape, dtype);
  if (!failed()) fill(t, pattern);
  return t;
}

void Run::fill(const Tensor& tensor, const Pattern& pattern) {
  const bool full = tensor.dtype() == DType::kF32;
  std::vector<uint8_t> table(static_cast<size_t>(Pattern::kPeriod * (full ? 4 : 2)));
  for (int64_t i = 0; i < Pattern::kPeriod; ++i) {
    const float value = pattern.at(i);
    const uint16_t half = numeric::float_to_bf16(value);
    std::memcpy(table.data() + i * (full ? 4 : 2), full ? static_cast<const void*>(&value) : &half,
                full ? 4 : 2);
  }
  repeat(tensor, table);
}

void Run::repeat(const Tensor& tensor, const std::vector<uint8_t>& period) {
  if (failed() || tensor.numel() == 0) return;
  auto* data = static_cast<char*>(tensor.raw_data());
  const int64_t total = tensor.numel() * bytes_of(tensor.dtype());
  int64_t filled = std::min<int64_t>(total, static_cast<int64_t>(period.size()));
  Status status =
      devices::copy(device_, data, Device{}, period.data(), static_cast<size_t>(filled), nullptr);
  if (status.ok()) status = devices::synchronize(device_);
  // The filled part consists of complete periods until the last copy.
  while (status.ok() && filled < total) {
    const int64_t more = std::min(filled, total - filled);
    status =
        devices::copy(device_, data + filled, device_, data, static_cast<size_t>(more), nullptr);
    filled += more;
  }
  if (status.ok()) status = devices::synchronize(device_);
  if (!status.ok()) fail(status.to_string());
}

Tensor Run::integers(const std::vector<int32_t>& values) {
  Tensor t = output({static_cast<int64_t>(values.size())}, DType::kI32);
  std::vector<uint8_t> bytes(values.size() * sizeof(int32_t));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  repeat(t, bytes);
  return t;
}

Tensor Run::output(const Shape& shape, DType dtype) {
  auto made = Tensor::empty(shape, dtype, device_);
  if (!made.ok()) {
    fail(made.status().to_string());
    return {};
  }
  return std::move(made).value();
}

void Run::set(const Tensor& tensor, int64_t index, float value) {
  if (failed()) return;
  const uint16_t half = numeric::float_to_bf16(value);
  const bool full = tensor.dtype() == DType::kF32;
  const size_t bytes = full ? 4 : 2;
  auto* to = static_cast<char*>(tensor.raw_data()) + index * static_cast<int64_t>(bytes);
  Status status = devices::copy(device_, to, Device{},
                                full ? static_cast<void*>(&value) : const_cast<uint16_t*>(&half),
                                bytes, nullptr);
  if (status.ok()) status = devices::synchronize(device_);
  if (!status.ok()) fail(status.to_string());
}

std::vector<float> Run::read(const Tensor& tensor, int64_t begin, int64_t count) {
  std::vector<float> result;
  if (failed()) return result;
  const DType dtype = tensor.dtype();
  const int64_t element = bytes_of(dtype);
  std::vector<uint8_t> raw(static_cast<size_t>(count * element));
  const auto* from = static_cast<const char*>(tensor.raw_data()) + begin * element;
  Status status = devices::copy(Device{}, raw.data(), tensor.device(), from, raw.size(), nullptr);
  if (status.ok()) status = devices::synchronize(tensor.device());
  if (!status.ok()) fail(status.to_string());
  for (int64_t i = 0; i < count; ++i) {
    float value = raw[static_cast<size_t>(i)];
    uint16_t half = 0;
    if (dtype == DType::kI32) {
      int32_t whole = 0;
      std::memcpy(&whole, raw.data() + 4 * i, 4);
      value = static_cast<float>(whole);
    } else if (element == 4) {
      std::memcpy(&value, raw.data() + 4 * i, 4);
    }
    if (dtype == DType::kF8E4M3) value = numeric::e4m3_to_float(raw[static_cast<size_t>(i)]);
    if (element == 2) {
      std::memcpy(&half, raw.data() + 2 * i, 2);
      value = numeric::bf16_to_float(half);
    }
    result.push_back(value);
  }
  if (spoils_) {
    float& middle = result[static_cast<size_t>(count / 2)];
    middle = dtype == DType::kU8 ? static_cast<float>((static_cast<int>(middle) + 64) % 256)
                                 : 1.5f * std::fabs(middle) + 1;
  }
  return result;
}

void Run::call(const char* op, const void* args, const te_fl_rng& rng) {
  if (failed()) return;
  CallOptions options;
  options.rng = rng;
  Status status = OpManager::instance().call(std::string_view(op), args, options);
  if (status.ok()) status = devices::synchronize(device_);
  if (!status.ok()) fail(status.to_string());
}

std::vector<int64_t> Run::windows(int64_t total, int64_t length) const {
  const int64_t last = std::max<int64_t>(total - length, 0);
  std::vector<int64_t> result = {0, last, (int64_t{1} << 31) - length / 2,
                                 (int64_t{1} << 30) - length / 2, (int64_t{1} << 32) - length / 2};
  std::mt19937_64 engine(5);
  for (int i = 0; i < 12; ++i) {
    result.push_back(static_cast<int64_t>(engine() % static_cast<uint64_t>(last + 1)));
  }
  std::erase_if(result, [&](int64_t begin) { return begin > last; });
  return result;
}

void Run::expect(const Tensor& tensor, const char* name, const Value& want, double relative,
                 double absolute) {
  expect_near(tensor, name, [&](int64_t i) {
    const double value = want(i);
    return Near{value, relative * std::fabs(value) + absolute};
  });
}

void Run::expect_near(const Tensor& tensor, const char* name, const NearValue& want,
                      int64_t length) {
  if (failed()) return;
  for (int64_t begin : windows(tensor.numel(), length)) {
    const int64_t count = std::min(length, tensor.numel() - begin);
    const std::vector<float> got = read(tensor, begin, count);
    for (int64_t i = 0; i < count && !failed(); ++i) {
      const Near expected = want(begin + i);
      const double found = got[static_cast<size_t>(i)];
      if (found == expected.value) continue;  // also for infinities
      if (!std::isfinite(expected.value) ||
          !(std::fabs(found - expected.value) <= expected.tolerance)) {
        fail(std::string(name) + "[" + std::to_string(begin + i) + "] is " + std::to_string(found) +
             ", expected " + std::to_string(expected.value));
      }
    }
  }
}

void Run::expect_sums(const Tensor& sums, const char* name, int64_t rows, int64_t cols,
                      const Value& value) {
  for (int64_t col : {int64_t{0}, int64_t{63}, cols / 2, cols - 7, cols - 1}) {
    if (failed()) return;
    double sum = 0, size = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const double v = value(row * cols + col);
      sum += v, size += std::fabs(v);
    }
    const std::vector<float> got = read(sums, col, 1);
    if (!failed() && !(std::fabs(double{got[0]} - sum) <= 1e-5 * size)) {
      fail(std::string(name) + "[" + std::to_string(col) + "] is " + std::to_string(got[0]) +
           ", expected " + std::to_string(sum));
    }
  }
}

}  // namespace te_fl::huge
