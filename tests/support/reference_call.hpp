// Host tensors and direct calls of the reference backend's descriptors, for its unit tests.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/outcome.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/numeric.hpp"

extern "C" const te_fl_plugin_header* te_fl_reference_query(const te_fl_host_info*);

namespace te_fl::testing {

using Shape = std::vector<int64_t>;

inline int64_t count(const Shape& shape) {
  int64_t n = 1;
  for (int64_t e : shape) n *= e;
  return n;
}

inline te_fl_dtype dl_dtype(int index) {
  switch (index) {
    case TE_FL_F32:
      return {TE_FL_CODE_FLOAT, 32, 1};
    case TE_FL_F16:
      return {TE_FL_CODE_FLOAT, 16, 1};
    case TE_FL_BF16:
      return {TE_FL_CODE_BFLOAT, 16, 1};
    case TE_FL_F8E4M3:
      return {TE_FL_CODE_FLOAT8_E4M3FN, 8, 1};
    case TE_FL_F8E5M2:
      return {TE_FL_CODE_FLOAT8_E5M2, 8, 1};
    case TE_FL_I32:
      return {TE_FL_CODE_INT, 32, 1};
    default:
      return {TE_FL_CODE_UINT, 8, 1};
  }
}

// A tensor in host memory, filled with 0xFF bytes (NaN in every float format) until fill() is
// called. FP8 tensors have per-tensor scaling with the given scale.
class HostTensor {
 public:
  HostTensor(Shape shape, int dtype)
      : HostTensor(
            shape, {}, 0, dtype,
            std::make_shared<std::vector<uint8_t>>(
                static_cast<size_t>(testing::count(shape)) * dl_dtype(dtype).bits / 8, 0xFF)) {}
  HostTensor(Shape shape, int dtype, const std::vector<double>& values, float scale = 1.0f)
      : HostTensor(std::move(shape), dtype) {
    set_scale(scale);
    fill(values);
  }
  void set_scale(float s) {
    scale = s;
    scale_inv = 1.0f / s;
  }
  // A view of another tensor's memory.
  HostTensor(const HostTensor& base, Shape shape, Shape strides, int64_t offset)
      : HostTensor(std::move(shape), std::move(strides), offset, base.dtype_, base.bytes_) {}
  HostTensor(const HostTensor&) = delete;
  HostTensor& operator=(const HostTensor&) = delete;

  operator const te_fl_tensor*() const { return &c_; }  // NOLINT: implicit on purpose
  const te_fl_tensor* c() const { return &c_; }
  te_fl_quant& quant() { return quant_; }
  const Shape& shape() const { return shape_; }
  int64_t size() const { return testing::count(shape_); }

  // Sets the logical values in row-major order, rounded to the dtype; FP8 values are quantised
  // under `scale`.
  void fill(const std::vector<double>& values) {
    ASSERT_EQ(static_cast<int64_t>(values.size()), size());
    for (int64_t i = 0; i < size(); ++i) set(i, values[static_cast<size_t>(i)]);
  }
  std::vector<double> values() const {
    std::vector<double> out;
    for (int64_t i = 0; i < size(); ++i) out.push_back(get(i));
    return out;
  }
  bool untouched() const {
    for (uint8_t byte : *bytes_) {
      if (byte != 0xFF) return false;
    }
    return true;
  }
  const std::vector<uint8_t>& bytes() const { return *bytes_; }
  std::vector<uint8_t>& bytes() { return *bytes_; }

  float scale = 1.0f;
  float scale_inv = 1.0f;
  float amax = 0.0f;

 private:
  HostTensor(Shape shape, Shape strides, int64_t offset, int dtype,
             std::shared_ptr<std::vector<uint8_t>> bytes)
      : shape_(std::move(shape)),
        strides_(std::move(strides)),
        dtype_(dtype),
        bytes_(std::move(bytes)) {
    c_.dl.data = bytes_->data();
    c_.dl.device = {TE_FL_DEVICE_CPU, 0};
    c_.dl.ndim = static_cast<int32_t>(shape_.size());
    c_.dl.dtype = dl_dtype(dtype);
    c_.dl.shape = shape_.data();
    c_.dl.strides = strides_.empty() ? nullptr : strides_.data();
    c_.dl.byte_offset = static_cast<uint64_t>(offset) * dl_dtype(dtype).bits / 8;
    if (dtype == TE_FL_F8E4M3 || dtype == TE_FL_F8E5M2) {
      quant_.scaling = TE_FL_SCALING_TENSOR;
      quant_.scale = &scale;
      quant_.scale_inv = &scale_inv;
      quant_.amax = &amax;
      c_.quant = &quant_;
    }
  }

  uint8_t* at(int64_t i) const {
    int64_t offset = 0;
    for (int d = c_.dl.ndim - 1; d >= 0; --d) {
      offset += i % shape_[static_cast<size_t>(d)] * backend::stride(c_, d);
      i /= shape_[static_cast<size_t>(d)];
    }
    return backend::data<uint8_t>(c_) + offset * dl_dtype(dtype_).bits / 8;
  }
  template <class T>
  void put(int64_t i, T value) {
    std::memcpy(at(i), &value, sizeof value);
  }
  template <class T>
  T take(int64_t i) const {
    T value;
    std::memcpy(&value, at(i), sizeof value);
    return value;
  }
  void set(int64_t i, double v) {
    switch (dtype_) {
      case TE_FL_F32:
        return put(i, static_cast<float>(v));
      case TE_FL_F16:
        return put(i, numeric::double_to_fp16(v));
      case TE_FL_BF16:
        return put(i, numeric::double_to_bf16(v));
      case TE_FL_F8E4M3:
        return put(i, numeric::float_to_e4m3(static_cast<float>(v) * scale));
      case TE_FL_F8E5M2:
        return put(i, numeric::float_to_e5m2(static_cast<float>(v) * scale));
      case TE_FL_I32:
        return put(i, static_cast<int32_t>(v));
      default:
        return put(i, static_cast<uint8_t>(v));
    }
  }
  double get(int64_t i) const {
    switch (dtype_) {
      case TE_FL_F32:
        return take<float>(i);
      case TE_FL_F16:
        return numeric::fp16_to_float(take<uint16_t>(i));
      case TE_FL_BF16:
        return numeric::bf16_to_float(take<uint16_t>(i));
      case TE_FL_F8E4M3:
        return double{numeric::e4m3_to_float(take<uint8_t>(i))} * scale_inv;
      case TE_FL_F8E5M2:
        return double{numeric::e5m2_to_float(take<uint8_t>(i))} * scale_inv;
      case TE_FL_I32:
        return take<int32_t>(i);
      default:
        return take<uint8_t>(i);
    }
  }

  Shape shape_, strides_;
  int dtype_;
  std::shared_ptr<std::vector<uint8_t>> bytes_;
  te_fl_quant quant_{};
  te_fl_tensor c_{};
};

// Runs an op of the reference backend through its plugin functions.
template <class Args>
Outcome run_reference(const char* op, const Args& args, te_fl_rng rng = {}) {
  const te_fl_host_info info{sizeof info, TE_FL_ABI_MAJOR, TE_FL_ABI_MINOR, 0, "test"};
  const te_fl_plugin_api& api = *te_fl_reference_query(&info)->api;
  std::string text;
  te_fl_error_sink sink{};
  sink.struct_size = sizeof sink;
  sink.host = &text;
  sink.write = [](void* host, const char* message) { *static_cast<std::string*>(host) += message; };
  void* instance = nullptr;
  static const te_fl_host_api host{};
  EXPECT_EQ(api.create(&host, &instance, &sink), TE_FL_OK) << text;
  uint32_t n = 0;
  const te_fl_op_desc* const* list = nullptr;
  EXPECT_EQ(api.ops(instance, &n, &list, &sink), TE_FL_OK) << text;
  te_fl_context ctx{};
  ctx.struct_size = sizeof ctx;
  ctx.device = {TE_FL_DEVICE_CPU, 0};
  ctx.rng = &rng;
  ctx.errors = &sink;
  te_fl_status status = TE_FL_NOT_FOUND;
  for (uint32_t i = 0; i < n; ++i) {
    if (std::strcmp(list[i]->op_name, op) == 0) status = list[i]->run(list[i]->self, &ctx, &args);
  }
  api.destroy(instance);
  return {status, text};
}

// Returns n random values, uniform in [low, high].
inline std::vector<double> random_values(int64_t n, uint32_t seed, double low = -1,
                                         double high = 1) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<double> out(static_cast<size_t>(n));
  for (double& v : out) v = static_cast<float>(uniform(engine));
  return out;
}

inline void expect_near(const std::vector<double>& got, const std::vector<double>& want,
                        double atol, double rtol, const char* what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(want[i])) {
      EXPECT_EQ(got[i], want[i]) << what << "[" << i << "]";
    } else {
      EXPECT_NEAR(got[i], want[i], atol + rtol * std::abs(want[i])) << what << "[" << i << "]";
    }
  }
}

}  // namespace te_fl::testing
