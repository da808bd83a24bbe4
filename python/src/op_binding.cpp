#include "op_binding.hpp"

#include <cmath>
#include <cstring>
#include <map>
#include <sstream>

#include "errors.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/ops/attention.h"
#include "te_fl/ops/dropout.h"
#include "te_fl/ops/gemm.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/optimizer.h"
#include "te_fl/ops/quantize.h"
#include "te_fl/ops/rope.h"
#include "te_fl/ops/softmax.h"
#include "te_fl/ops/tensor.h"

namespace te_fl::python {
namespace {

// What the argument struct of an op of the catalogue holds before anything is given.
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
#include "op_defaults.inc"
};

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

// Of an op outside the catalogue the neutral values are the defaults.
std::vector<std::byte> defaults_of(const te_fl_op_schema& schema) {
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

std::vector<std::string> words_of(const char* text) {
  std::vector<std::string> words;
  std::istringstream in(text != nullptr ? text : "");
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

std::unique_ptr<OpBinding> make_binding(OpId id) {
  const te_fl_op_schema* schema = OpManager::instance().registry().schema(id);
  auto binding = std::make_unique<OpBinding>(OpBinding{id, schema, {}, defaults_of(*schema)});
  for (uint32_t i = 0; i < schema->arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema->args[i];
    PyObject* name = Ref::take(PyUnicode_InternFromString(arg.name)).release();
    binding->args.push_back({&arg, name, words_of(arg.enum_names)});
  }
  return binding;
}

}  // namespace

int OpBinding::find(PyObject* name) const noexcept {
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].name == name) return static_cast<int>(i);  // keywords of calls are interned
  }
  for (size_t i = 0; i < args.size(); ++i) {
    if (PyUnicode_Compare(args[i].name, name) == 0) return static_cast<int>(i);
  }
  return -1;
}

const OpBinding& bind(PyObject* name) {
  static auto* bindings = new std::map<uint32_t, std::unique_ptr<OpBinding>>();
  const std::string text(text_of(name, "the op's name"));
  Result<OpId> found = [&] {
    const WithoutLock unlocked;  // the first use discovers and loads plugins
    return OpManager::instance().registry().find(text);
  }();
  const OpId id = value_of(std::move(found));
  std::unique_ptr<OpBinding>& kept = (*bindings)[id.index];
  if (kept == nullptr) kept = make_binding(id);
  return *kept;
}

}  // namespace te_fl::python
