#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "core/op/op_table.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::core {

inline const te_fl_op_schema* catalogue_schema(std::string_view name) {
  for (const te_fl_op_schema* schema : catalogue()) {
    if (name == schema->name) return schema;
  }
  ADD_FAILURE() << "no op " << name;
  return nullptr;
}

inline std::unique_ptr<const CompiledOp> compile(std::string_view name) {
  return CompiledOp::compile(*catalogue_schema(name)).value();
}

// Expects both forms of the check to agree; returns the error message, "" for a valid call.
inline std::string check(const CompiledOp& op, const void* args, Signature* out = nullptr) {
  Signature signature;
  const bool good = op.check(args, signature);
  const Status status = op.check_status(args);
  EXPECT_EQ(good, status.ok()) << status.to_string();
  if (out != nullptr) *out = signature;
  if (!status.ok()) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(status.clean());
  }
  return status.message();
}

// Builds a schema step by step; owns the memory that its descriptions point to.
struct SchemaBuilder {
  std::deque<te_fl_arg_desc> descs;
  std::vector<const te_fl_arg_desc*> pointers;
  te_fl_op_schema schema{};

  explicit SchemaBuilder(const char* name = "acme::op") {
    schema.struct_size = sizeof schema;
    schema.name = name;
  }
  te_fl_arg_desc& add(const char* name, te_fl_arg_type type, te_fl_arg_role role, uint32_t offset,
                      const char* shape = "any") {
    te_fl_arg_desc& d = descs.emplace_back();
    d = {};
    d.struct_size = sizeof d;
    d.type = static_cast<uint8_t>(type);
    d.role = static_cast<uint8_t>(role);
    d.offset = offset;
    d.dtypes = TE_FL_MASK_HIGH;
    d.scalings = 1;
    d.name = name;
    d.shape = shape;
    return d;
  }
  // Appends a tensor argument after the last one; offsets start at 8.
  te_fl_arg_desc& tensor(const char* name, const char* shape, te_fl_arg_role role = TE_FL_IN) {
    return add(name, TE_FL_ARG_TENSOR, role, 8 + 8 * static_cast<uint32_t>(descs.size()), shape);
  }
  const te_fl_op_schema& build() {
    pointers.clear();
    uint32_t end = 4;
    for (const te_fl_arg_desc& d : descs) {
      pointers.push_back(&d);
      end = std::max(end, d.offset + 8);
    }
    if (schema.args_size == 0) schema.args_size = end;
    if (schema.least_args_size == 0) schema.least_args_size = schema.args_size;
    schema.arg_count = static_cast<uint32_t>(pointers.size());
    schema.args = pointers.data();
    return schema;
  }
  Result<std::unique_ptr<const CompiledOp>> compile() { return CompiledOp::compile(build()); }
};

// An argument struct for schemas of SchemaBuilder::tensor: struct_size, then pointers.
struct PointerArgs {
  uint32_t struct_size;
  uint32_t padding = 0;
  const te_fl_tensor* tensors[16] = {};
  explicit PointerArgs(std::initializer_list<const te_fl_tensor*> list)
      : struct_size(static_cast<uint32_t>(8 + 8 * list.size())) {
    std::copy(list.begin(), list.end(), tensors);
  }
};

inline Tensor f32(std::initializer_list<int64_t> shape) {
  return Tensor::zeros(shape, DType::kF32).value();
}
inline Tensor quantised(std::initializer_list<int64_t> shape, const QuantSpec& spec = {}) {
  return Tensor::empty_quantized(std::span(shape.begin(), shape.size()), spec).value();
}

// A tensor whose C struct the test may corrupt.
struct Raw {
  te_fl_quant quant;
  te_fl_tensor t;
  int64_t shape[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};
  explicit Raw(const Tensor& from) : t(*from.c()) {
    if (t.quant != nullptr) quant = *t.quant, t.quant = &quant;
    for (int i = 0; i < from.rank(); ++i) {
      shape[i] = from.shape()[static_cast<size_t>(i)];
      strides[i] = from.strides()[static_cast<size_t>(i)];
    }
    t.dl.shape = shape;
  }
  Raw(const Raw&) = delete;
  Raw& operator=(const Raw&) = delete;
  Raw& strided() {
    t.dl.strides = strides;
    return *this;
  }
};

}  // namespace te_fl::core
