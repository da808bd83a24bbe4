#include "ops/op_binding.hpp"

#include <algorithm>
#include <map>
#include <string_view>

#include "ops/op_defaults.hpp"
#include "py/errors.hpp"
#include "te_fl/op_manager.hpp"

namespace te_fl::python {
namespace {

// Returns true for shape rules such as "M K", "... H" and "trans_a ? K M : M K", and false for "N",
// "@..." and "any".
bool is_matrix(const te_fl_arg_desc& arg) {
  std::string_view rule = arg.shape != nullptr ? arg.shape : "";
  rule = rule.substr(rule.find_last_of("?:") == rule.npos ? 0 : rule.find_last_of("?:") + 2);
  const auto terms = 1 + std::count(rule.begin(), rule.end(), ' ');
  return rule.starts_with("...") ? terms <= 2 : terms == 2;
}

std::unique_ptr<OpBinding> make_binding(OpId id) {
  const te_fl_op_schema* schema = OpManager::instance().registry().schema(id);
  auto binding = std::make_unique<OpBinding>();
  binding->id = id;
  binding->schema = schema;
  binding->defaults = default_arguments(*schema);
  binding->rules = value_or_throw(OutputRules::compile(*schema));
  for (uint32_t i = 0; i < schema->arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema->args[i];
    PyObject* name = Ref::take(PyUnicode_InternFromString(arg.name)).release();
    binding->args.push_back({&arg, name, split_words(arg.enum_names), is_matrix(arg)});
    if (arg.role == TE_FL_IN) binding->inputs.push_back(i);
    const bool allocated = arg.role == TE_FL_OUT && arg.type == TE_FL_ARG_TENSOR &&
                           (arg.flags & (TE_FL_ARG_HOST | TE_FL_ARG_QUANT_ONLY)) == 0;
    if (!allocated) continue;
    binding->outputs.push_back(i);
    if ((arg.flags & TE_FL_ARG_OPTIONAL) == 0) binding->required_outputs |= uint64_t{1} << i;
  }
  return binding;
}

}  // namespace

int OpBinding::find(PyObject* name) const noexcept {
  for (size_t i = 0; i < args.size(); ++i) {
    // Keywords of calls are interned, so comparing pointers is enough.
    if (args[i].name == name) return static_cast<int>(i);
  }
  for (size_t i = 0; i < args.size(); ++i) {
    if (PyUnicode_Compare(args[i].name, name) == 0) return static_cast<int>(i);
  }
  return -1;
}

const OpBinding& bind(PyObject* name) {
  static auto* bindings = new std::map<uint32_t, std::unique_ptr<OpBinding>>();
  const std::string text(to_text(name, "the op's name"));
  Result<OpId> found = [&] {
    const WithoutLock unlocked;  // the first use discovers and loads plugins
    return OpManager::instance().registry().find(text);
  }();
  const OpId id = value_or_throw(std::move(found));
  std::unique_ptr<OpBinding>& kept = (*bindings)[id.index];
  if (kept == nullptr) kept = make_binding(id);
  return *kept;
}

}  // namespace te_fl::python
