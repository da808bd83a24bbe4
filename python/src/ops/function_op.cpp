#include "ops/function_op.hpp"

#include <atomic>
#include <utility>

#include "py/errors.hpp"
#include "te_fl/environment.hpp"
#include "te_fl/log.hpp"

namespace te_fl::python {
namespace {

struct FunctionArgs {
  uint32_t struct_size = sizeof(FunctionArgs);
  uint32_t reserved = 0;
  int64_t call = 0;
};

constexpr const char* kSummary = "An op of Python functions: its arguments and results are theirs.";

const te_fl_arg_desc& call_argument() {
  static const te_fl_arg_desc arg = [] {
    te_fl_arg_desc desc;
    desc.type = TE_FL_ARG_I64;
    desc.offset = offsetof(FunctionArgs, call);
    desc.name = "call";
    return desc;
  }();
  return arg;
}

thread_local FunctionCall* t_call = nullptr;

// Makes a call the innermost one of this thread during its lifetime.
class Current {
 public:
  explicit Current(FunctionCall& call) : outer_(std::exchange(t_call, &call)) {}
  ~Current() { t_call = outer_; }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  FunctionCall* outer_;
};

// Every call gets a number of its own, so a cached decision for one call is never used for another.
FunctionArgs next_arguments() {
  static std::atomic<int64_t> number{0};
  FunctionArgs args;
  args.call = number.fetch_add(1, std::memory_order_relaxed) + 1;
  return args;
}

}  // namespace

bool is_function_op(const te_fl_op_schema& schema) noexcept {
  return schema.summary != nullptr && std::string_view(schema.summary) == kSummary;
}

Result<bool> declare_function_op(OpRegistry& registry, const std::string& name) {
  if (const Result<OpId> found = registry.find(name); found.ok()) {
    return is_function_op(*registry.schema(*found));
  }
  const te_fl_arg_desc* const args[] = {&call_argument()};
  te_fl_op_schema schema;
  schema.flags = TE_FL_SCHEMA_ENQUIRY;  // the op is neither copied to another device nor run twice
  schema.args_size = schema.least_args_size = sizeof(FunctionArgs);
  schema.arg_count = 1;
  schema.args = args;
  schema.name = name.c_str();
  schema.summary = kSummary;
  schema.formula = "";
  schema.source = "";
  // A name "vendor::op" does not resemble the name of a catalogue op by mistake.
  const std::string near =
      name.find("::") != std::string::npos ? "" : environment::nearest(name, registry.op_names());
  TE_FL_RETURN_IF_ERROR(registry.declare_op(schema).status());
  if (!near.empty()) {
    log::warning("op '" + name + "' is a new one of Python functions; if it was to be '" + near +
                 "', correct its name");
  }
  return true;
}

std::set<std::string>& function_op_names() {
  static auto* const names = new std::set<std::string>;
  return *names;
}

std::optional<OpId> find_function_op(OpManager& manager, PyObject* name) {
  const std::string text(to_text(name, "the op's name"));
  const OpId id = value_or_throw(without_lock([&] { return manager.registry().find(text); }));
  if (!is_function_op(*manager.registry().schema(id))) return std::nullopt;
  return id;
}

FunctionCall& current_function_call() noexcept { return *t_call; }

Ref call_function_op(OpManager& manager, OpId op, PyObject* positional, PyObject* keywords) {
  FunctionCall call{positional, keywords, {}};
  const Current current(call);
  const FunctionArgs args = next_arguments();
  check(without_lock([&] { return manager.call(op, &args); }));
  return std::move(call.result);
}

Result<Decision> resolve_function_op(OpManager& manager, OpId op, PyObject* positional,
                                     PyObject* keywords) {
  FunctionCall call{positional, keywords, {}};
  const Current current(call);
  const FunctionArgs args = next_arguments();
  return without_lock([&] { return manager.resolve(op, &args); });
}

}  // namespace te_fl::python
