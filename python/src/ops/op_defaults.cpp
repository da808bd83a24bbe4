#include "ops/op_defaults.hpp"

#include <cstring>
#include <sstream>

#include "te_fl/ops/activation.h"
#include "te_fl/ops/attention.h"
#include "te_fl/ops/collective.h"
#include "te_fl/ops/dropout.h"
#include "te_fl/ops/gemm.h"
#include "te_fl/ops/moe.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/optimizer.h"
#include "te_fl/ops/quantize.h"
#include "te_fl/ops/rope.h"
#include "te_fl/ops/softmax.h"
#include "te_fl/ops/tensor.h"

namespace te_fl::python {
namespace {

// The default argument struct of one catalogue op.
struct Defaults {
  const char* op;
  const void* data;
  size_t bytes;
};
template <class Args>
const Args kDefaults{};
template <class Args>
Defaults of(const char* op) {
  return {op, &kDefaults<Args>, sizeof(Args)};
}
const Defaults kCatalogue[] = {
#include "ops/op_defaults.inc"
};

}  // namespace

void put_scalar(std::vector<std::byte>& args, const te_fl_arg_desc& arg, double value) {
  const auto put = [&](auto v) { std::memcpy(args.data() + arg.offset, &v, sizeof v); };
  switch (arg.type) {
    case TE_FL_ARG_BOOL:
    case TE_FL_ARG_I32:
    case TE_FL_ARG_ENUM:
      return put(static_cast<int32_t>(value));
    case TE_FL_ARG_I64:
      return put(static_cast<int64_t>(value));
    case TE_FL_ARG_F32:
      return put(static_cast<float>(value));
    case TE_FL_ARG_F64:
      return put(value);
    default:
      return;
  }
}

std::vector<std::byte> default_arguments(const te_fl_op_schema& schema) {
  for (const Defaults& d : kCatalogue) {
    if (std::strcmp(d.op, schema.name) != 0) continue;
    const auto* data = static_cast<const std::byte*>(d.data);
    return {data, data + d.bytes};
  }
  std::vector<std::byte> args(schema.args_size);
  std::memcpy(args.data(), &schema.args_size, sizeof schema.args_size);
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    put_scalar(args, *schema.args[i], schema.args[i]->neutral);
  }
  return args;
}

std::vector<std::string> split_words(const char* text) {
  std::vector<std::string> words;
  std::istringstream in(text != nullptr ? text : "");
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

}  // namespace te_fl::python
