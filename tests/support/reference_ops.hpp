// Calls ops of the reference backend through its query function and descriptors, without the
// dispatcher, on host tensors.
#pragma once

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/expect.hpp"
#include "support/outcome.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/plugin.h"

extern "C" const te_fl_plugin_header* te_fl_reference_query(const te_fl_host_info*);

namespace te_fl::testing {

inline const te_fl_op_desc& reference_op(const std::string& name) {
  static const std::map<std::string, const te_fl_op_desc*> ops = [] {
    const te_fl_plugin_api& api = *te_fl_reference_query(nullptr)->api;
    // Never destroyed: the descriptors are used until exit.
    static void* instance = nullptr;
    uint32_t count = 0;
    const te_fl_op_desc* const* list = nullptr;
    static const te_fl_host_api host{};
    EXPECT_EQ(api.create(&host, &instance, nullptr), TE_FL_OK);
    EXPECT_EQ(api.ops(instance, &count, &list, nullptr), TE_FL_OK);
    std::map<std::string, const te_fl_op_desc*> result;
    for (uint32_t i = 0; i < count; ++i) result[list[i]->op_name] = list[i];
    EXPECT_EQ(result.size(), count) << "an op is listed twice";
    return result;
  }();
  return *ops.at(name);
}

template <class Args>
Outcome call(const std::string& op, const Args& args, te_fl_rng rng = {}) {
  Outcome outcome;
  te_fl_error_sink sink{
      sizeof(te_fl_error_sink), 0, &outcome.text,
      [](void* host, const char* text) { *static_cast<std::string*>(host) += text; }};
  te_fl_context ctx{};
  ctx.struct_size = sizeof ctx;
  ctx.device = {TE_FL_DEVICE_CPU, 0};
  ctx.rng = &rng;
  ctx.errors = &sink;
  const te_fl_op_desc& desc = reference_op(op);
  outcome.status = desc.run(desc.self, &ctx, &args);
  return outcome;
}

// A host tensor that owns its memory. New memory is filled with 0xAB, which shows elements that an
// op failed to write or should not have written.
class Array {
 public:
  static constexpr uint8_t kFresh = 0xAB;

  Array(te_fl_dtype_index dtype, std::vector<int64_t> shape, std::vector<double> values = {})
      : dtype_(dtype), shape_(std::move(shape)) {
    int64_t size = 1;
    for (const int64_t extent : shape_) size *= extent;
    storage_.assign(static_cast<size_t>((size * dtype_of().bits + 7) / 8), kFresh);
    tensor_.dl.data = storage_.data();
    bind();
    for (size_t i = 0; i < values.size(); ++i) set(i, values[i]);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  // Makes a view of another array's storage, with a dtype, shape and element strides of its own.
  Array(Array& base, te_fl_dtype_index dtype, std::vector<int64_t> shape,
        std::vector<int64_t> strides = {}, int64_t first = 0)
      : dtype_(dtype), shape_(std::move(shape)), strides_(std::move(strides)) {
    tensor_.dl.data = base.storage_.data();
    tensor_.dl.byte_offset = static_cast<uint64_t>(first * dtype_of().bits / 8);
    bind();
    if (!strides_.empty()) tensor_.dl.strides = strides_.data();
  }

  // Makes the tensor quantised. `row_scales` and `column_scales` are the element counts of the
  // scale_inv arrays; 0: no such array.
  Array& quantised(te_fl_scaling scaling, uint32_t flags, int64_t row_scales, int64_t column_scales,
                   float scale = 1.0f) {
    const size_t bytes = scaling >= TE_FL_SCALING_MXFP8 ? 1 : 4;
    quant_.scaling = scaling;
    quant_.flags = flags;
    row_scales_.assign(static_cast<size_t>(row_scales) * bytes, kFresh);
    column_scales_.assign(static_cast<size_t>(column_scales) * bytes, kFresh);
    scale_ = scale;
    quant_.scale = &scale_;
    quant_.amax = &amax_;
    if (row_scales > 0) quant_.scale_inv = row_scales_.data();
    if (row_scales == 0) tensor_.dl.data = nullptr;
    if (column_scales > 0) {
      columns_.assign(storage_.size(), kFresh);
      quant_.columnwise_data = columns_.data();
      if (scaling != TE_FL_SCALING_TENSOR) quant_.columnwise_scale_inv = column_scales_.data();
      if (scaling == TE_FL_SCALING_TENSOR) quant_.scale_inv = column_scales_.data();
    }
    tensor_.quant = &quant_;
    return *this;
  }

  operator const te_fl_tensor*() const { return &tensor_; }  // NOLINT: implicit on purpose
  te_fl_tensor& tensor() { return tensor_; }
  te_fl_quant& quant() { return quant_; }
  std::vector<uint8_t>& bytes() { return storage_; }
  std::vector<uint8_t>& columns() { return columns_; }
  std::vector<uint8_t>& row_scale_bytes() { return row_scales_; }
  std::vector<uint8_t>& column_scale_bytes() { return column_scales_; }
  std::vector<float> row_scales() const { return to_floats(row_scales_); }
  std::vector<float> column_scales() const { return to_floats(column_scales_); }
  float& amax() { return amax_; }
  float& scale() { return scale_; }

  template <class T>
  T* data() {
    return reinterpret_cast<T*>(storage_.data());
  }

  void set(size_t i, double value) {
    switch (dtype_) {
      case TE_FL_F64:
        data<double>()[i] = value;
        break;
      case TE_FL_F32:
        data<float>()[i] = static_cast<float>(value);
        break;
      case TE_FL_F16:
        data<uint16_t>()[i] = numeric::double_to_fp16(value);
        break;
      case TE_FL_BF16:
        data<uint16_t>()[i] = numeric::double_to_bf16(value);
        break;
      case TE_FL_F8E4M3:
        storage_[i] = numeric::double_to_e4m3(value);
        break;
      case TE_FL_F8E5M2:
        storage_[i] = numeric::double_to_e5m2(value);
        break;
      case TE_FL_I32:
        data<int32_t>()[i] = static_cast<int32_t>(value);
        break;
      case TE_FL_I64:
        data<int64_t>()[i] = static_cast<int64_t>(value);
        break;
      default:
        storage_[i] = static_cast<uint8_t>(value);
    }
  }
  double get(size_t i) {
    switch (dtype_) {
      case TE_FL_F64:
        return data<double>()[i];
      case TE_FL_F32:
        return data<float>()[i];
      case TE_FL_F16:
        return numeric::fp16_to_float(data<uint16_t>()[i]);
      case TE_FL_BF16:
        return numeric::bf16_to_float(data<uint16_t>()[i]);
      case TE_FL_F8E4M3:
        return numeric::e4m3_to_float(storage_[i]);
      case TE_FL_F8E5M2:
        return numeric::e5m2_to_float(storage_[i]);
      case TE_FL_I32:
        return data<int32_t>()[i];
      case TE_FL_I64:
        return static_cast<double>(data<int64_t>()[i]);
      default:
        return storage_[i];
    }
  }
  std::vector<double> values() {
    std::vector<double> result(storage_.size() * 8 / dtype_of().bits);
    for (size_t i = 0; i < result.size(); ++i) result[i] = get(i);
    return result;
  }
  bool untouched() const {
    for (const uint8_t byte : storage_) {
      if (byte != kFresh) return false;
    }
    return true;
  }

 private:
  te_fl_dtype dtype_of() const {
    static constexpr te_fl_dtype kDtypes[TE_FL_DTYPE_COUNT] = {
        {2, 64, 1}, {2, 32, 1}, {2, 16, 1}, {4, 16, 1}, {10, 8, 1}, {12, 8, 1},
        {17, 4, 1}, {14, 8, 1}, {0, 8, 1},  {0, 16, 1}, {0, 32, 1}, {0, 64, 1},
        {1, 8, 1},  {1, 16, 1}, {1, 32, 1}, {1, 64, 1}, {6, 8, 1}};
    return kDtypes[dtype_];
  }
  void bind() {
    tensor_.dl.device = {TE_FL_DEVICE_CPU, 0};
    tensor_.dl.ndim = static_cast<int32_t>(shape_.size());
    tensor_.dl.dtype = dtype_of();
    tensor_.dl.shape = shape_.data();
  }
  static std::vector<float> to_floats(const std::vector<uint8_t>& bytes) {
    std::vector<float> result(bytes.size() / 4);
    std::memcpy(result.data(), bytes.data(), result.size() * 4);
    return result;
  }

  te_fl_dtype_index dtype_;
  std::vector<int64_t> shape_, strides_;
  std::vector<uint8_t> storage_, columns_, row_scales_, column_scales_;
  float scale_ = 1.0f, amax_ = 0.0f;
  te_fl_quant quant_{};
  te_fl_tensor tensor_{};
};

inline void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                        double absolute, double relative) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(actual[i])) << "element " << i << " is " << actual[i];
      continue;
    }
    if (std::isinf(expected[i])) {
      EXPECT_EQ(actual[i], expected[i]) << "element " << i;
      continue;
    }
    EXPECT_NEAR(actual[i], expected[i], absolute + relative * std::abs(expected[i]))
        << "element " << i;
  }
}

}  // namespace te_fl::testing
