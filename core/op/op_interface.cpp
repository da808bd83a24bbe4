// The public member functions of CompiledOp.
#include <cstring>

#include "core/base/abi_struct.hpp"
#include "core/base/settings.hpp"
#include "core/base/text.hpp"
#include "core/op/call_words.hpp"
#include "core/op/collective.hpp"
#include "core/op/compiled_op.hpp"
#include "core/op/op_finder.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::core {
namespace {

// Finds the first member in which two descriptions differ; ignores further differences.
class Difference {
 public:
  // Sets the location for the differences that follow: "argument 'x': ".
  void in(std::string where) { where_ = std::move(where); }
  void texts(const char* member, const char* mine, const char* other) {
    const auto view = [](const char* s) {
      return s == nullptr ? std::string_view() : std::string_view(s, strnlen(s, kMaxTextLength));
    };
    if (!found_.empty() || view(mine) == view(other)) return;
    const auto shown = [&](const char* s) {
      constexpr size_t kMost = 60;
      const std::string_view text = view(s);
      if (text.empty()) return std::string("none");
      const bool cut = text.size() > kMost;
      return "'" + std::string(text.substr(0, kMost)) + (cut ? "...'" : "'");
    };
    found_ = where_ + member + " is " + shown(mine) + ", not " + shown(other);
  }
  template <class T>
  void numbers(const char* member, T mine, T other) {
    if (!found_.empty() || mine == other) return;
    found_ = where_ + member + " is " + std::to_string(mine) + ", not " + std::to_string(other);
  }
  void sizes(uint32_t size, uint32_t least) {
    if (found_.empty() && !plausible_size(size, least)) {
      found_ = where_ + "the other has " + size_text(size, least);
    }
  }
  void arguments(const te_fl_arg_desc& mine, const te_fl_arg_desc& other);

  bool none() const { return found_.empty(); }
  std::string take() { return std::move(found_); }

 private:
  std::string where_, found_;
};

void Difference::arguments(const te_fl_arg_desc& a, const te_fl_arg_desc& b) {
  texts("name", a.name, b.name);
  numbers("type", a.type, b.type);
  numbers("role", a.role, b.role);
  numbers("flags", a.flags, b.flags);
  numbers("offset", a.offset, b.offset);
  numbers("count_offset", a.count_offset, b.count_offset);
  numbers("dtypes", a.dtypes, b.dtypes);
  numbers("scalings", a.scalings, b.scalings);
  texts("shape", a.shape, b.shape);
  texts("inout_if", a.inout_if, b.inout_if);
  texts("aliases", a.aliases, b.aliases);
  texts("same_as", a.same_as, b.same_as);
  texts("enum_names", a.enum_names, b.enum_names);
  numbers("neutral", a.neutral, b.neutral);
  numbers("min", a.min, b.min);
  numbers("max", a.max, b.max);
  texts("extents", a.extents, b.extents);
}

// Calls f(argument, tensor) for every present tensor until f returns false. Also accepts calls that
// check() would refuse.
template <class F>
void for_each_tensor(const CompiledOp::Impl& op, const void* raw, F&& f) {
  const ArgsView args(raw);
  for (size_t i = 0; i < op.args.size(); ++i) {
    const Arg& arg = op.args[i];
    const bool list = arg.is_list();
    if (!list && !arg.is_tensor()) continue;
    const int64_t count = list ? args.count(arg) : 1;
    if (count > kMaxListCount) continue;
    for (int64_t k = 0; k < count; ++k) {
      const te_fl_tensor* t = list ? args.element(arg, k) : args.tensor(arg);
      if (t != nullptr && !f(static_cast<int>(i), *t)) return;
    }
  }
}

}  // namespace

CompiledOp::CompiledOp(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)), layout_(impl_->layout.get()) {}
CompiledOp::~CompiledOp() = default;

Result<std::unique_ptr<const CompiledOp>> CompiledOp::compile(const te_fl_op_schema& schema) {
  ensure_environment();  // reads TE_FL_VALIDATE once, so that check() need not
  auto impl = std::make_unique<Impl>();
  TE_FL_RETURN_IF_ERROR(impl->compile(schema));
  return std::unique_ptr<const CompiledOp>(new CompiledOp(std::move(impl)));
}

const te_fl_op_schema& CompiledOp::schema() const noexcept { return impl_->schema; }

bool CompiledOp::check(const void* args, Signature& out) const noexcept {
  return Finder(*impl_, args).run(out);
}

std::atomic<const CollectiveKeeper*> g_collective_keeper{nullptr};

const te_fl_communicator* CompiledOp::communicator(const void* args) const noexcept {
  const ArgsView view(args);
  for (const uint8_t i : impl_->communicators) {
    const Arg& arg = impl_->args[i];
    const auto* c = view.has(arg) ? view.read<const te_fl_communicator*>(arg.offset) : nullptr;
    if (c != nullptr) return c;
  }
  return nullptr;
}

bool CompiledOp::signature(const void* args, Signature& out) const noexcept {
  return Finder(*impl_, args).signature(out);
}

Status CompiledOp::check_status(const void* args) const {
  Finder finder(*impl_, args);
  Signature ignored;
  if (finder.run(ignored)) return {};
  return invalid_argument(std::string(impl_->schema.name) + ": " +
                          describe_finding(*impl_, finder));
}

Result<uint32_t> CompiledOp::later_mask(const char* names) const {
  uint32_t mask = 0;
  for (const std::string& name : words(names != nullptr ? names : "")) {
    const int i = impl_->find_arg(name);
    if (i >= 0 && impl_->args[static_cast<size_t>(i)].later != 0) {
      mask |= impl_->args[static_cast<size_t>(i)].later;
      continue;
    }
    return invalid_argument("later_args names '" + name + "', which is " +
                            (i < 0 ? "no argument of op '" : "of the first form of op '") +
                            impl_->schema.name + "', not one of its later arguments (" +
                            (impl_->later_count == 0 ? "it has none" : later_names(~uint32_t{0})) +
                            "; rule R23)");
  }
  return mask;
}

std::string CompiledOp::later_names(uint32_t mask) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < impl_->args.size(); ++i) {
    if ((impl_->args[i].later & mask) != 0) names.emplace_back(impl_->descs[i].name);
  }
  return join(names);
}

std::string CompiledOp::dtype_outside(const void* args, uint64_t mask) const {
  std::string found;
  for_each_tensor(*impl_, args, [&](int i, const te_fl_tensor& t) {
    const int dtype = dtype_index(t.dl.dtype);
    if (dtype == kInvalidDType || (mask >> dtype & 1) == 0) found = impl_->name_of(i);
    return found.empty();
  });
  return found;
}

std::string CompiledOp::scaling_outside(const void* args, uint32_t mask) const {
  std::string found;
  for_each_tensor(*impl_, args, [&](int i, const te_fl_tensor& t) {
    const te_fl_quant* q = quant_of(t);
    const uint32_t scaling = q == nullptr ? static_cast<uint32_t>(TE_FL_SCALING_NONE) : q->scaling;
    if (scaling >= TE_FL_SCALING_COUNT || (mask >> scaling & 1) == 0) found = impl_->name_of(i);
    return found.empty();
  });
  return found;
}

bool CompiledOp::needs_contents(uint32_t arg, const void* args) const noexcept {
  return impl_->needs_contents(impl_->args[arg], ArgsView(args));
}

te_fl_saved* CompiledOp::saved(const void* args) const noexcept {
  if (impl_->saved < 0) return nullptr;
  const Arg& arg = impl_->args[static_cast<size_t>(impl_->saved)];
  const ArgsView view(args);
  return view.has(arg) ? view.read<te_fl_saved*>(arg.offset) : nullptr;
}

std::string CompiledOp::difference(const te_fl_op_schema& raw) const {
  const te_fl_op_schema& mine = impl_->schema;
  Difference found;
  found.sizes(raw.struct_size, kLeastSchema);
  if (!found.none()) return found.take();
  const auto other = copy_struct<te_fl_op_schema>(&raw);
  found.texts("name", mine.name, other.name);
  found.numbers("flags", mine.flags, other.flags);
  found.numbers("args_size", mine.args_size, other.args_size);
  found.numbers("least_args_size", mine.least_args_size, other.least_args_size);
  found.numbers("arg_count", mine.arg_count, other.arg_count);
  for (uint32_t i = 0; found.none() && i < mine.arg_count; ++i) {
    const te_fl_arg_desc* arg = other.args != nullptr ? other.args[i] : nullptr;
    const std::string name = std::string("argument '") + mine.args[i]->name + "': ";
    if (arg == nullptr) return name + "the other's description is NULL";
    found.in(name);
    found.sizes(arg->struct_size, kLeastArgDesc);
    if (found.none()) found.arguments(*mine.args[i], copy_struct<te_fl_arg_desc>(arg));
  }
  found.in("");
  found.texts("rules", mine.rules, other.rules);
  found.texts("gradient", mine.gradient, other.gradient);
  found.texts("operations", mine.operations, other.operations);
  found.texts("summary", mine.summary, other.summary);
  found.texts("formula", mine.formula, other.formula);
  found.texts("source", mine.source, other.source);
  return found.take();
}

}  // namespace te_fl::core
