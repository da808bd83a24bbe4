#pragma once

#include <memory>
#include <string_view>

#include "nn/modules/gemm_unit.hpp"
#include "te_fl/nn/modules/init.hpp"

namespace te_fl::nn::detail {

struct GemmOptions {
  std::string_view module = {};  // the name in error messages
  int64_t in = 0;
  int64_t out = 0;
  bool bias = true;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0;
  init::Shard shard = {};
  bool high_precision = false;
  std::shared_ptr<Parameter> tied_weight = nullptr;
  bool return_bias = false;  // the caller adds the bias
  bool is_fc2 = false;       // as in GemmUnit::Spec
  bool partial = false;      // as in GemmUnit::Spec, like the next three
  bool first = true;
  std::shared_ptr<SequenceRanks> input_rows = nullptr, gradient_rows = nullptr;
};

// Makes a GemmUnit with new or tied parameters. Errors contain the module and the field.
Result<std::unique_ptr<GemmUnit>> make_gemm(const GemmOptions& options);

// INVALID_ARGUMENT unless value >= 1.
Status check_size(std::string_view module, std::string_view field, int64_t value);
// INVALID_ARGUMENT unless 0 <= p < 1.
Status check_dropout(std::string_view module, std::string_view field, float p);

}  // namespace te_fl::nn::detail
