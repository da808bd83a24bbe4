#include "core/op/op_table.hpp"

#include <cstring>

#include "core/base/abi_struct.hpp"
#include "core/base/settings.hpp"
#include "core/base/text.hpp"
#include "core/op/compiled_op.hpp"
#include "core/op/op_finder.hpp"
#include "core/op/op_memo.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::core {
namespace {

bool same_text(const char* a, const char* b) {
  return std::string_view(a != nullptr ? a : "") == std::string_view(b != nullptr ? b : "");
}

bool same_arg(const te_fl_arg_desc& a, const te_fl_arg_desc& b) {
  const bool numbers = a.type == b.type && a.role == b.role && a.flags == b.flags &&
                       a.offset == b.offset && a.count_offset == b.count_offset &&
                       a.dtypes == b.dtypes && a.scalings == b.scalings && a.neutral == b.neutral &&
                       a.min == b.min && a.max == b.max;
  return numbers && same_text(a.name, b.name) && same_text(a.shape, b.shape) &&
         same_text(a.inout_if, b.inout_if) && same_text(a.aliases, b.aliases) &&
         same_text(a.same_as, b.same_as) && same_text(a.enum_names, b.enum_names);
}

// Calls f(argument, tensor) for every tensor present until it returns false. Tolerates whatever
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

CompiledOp::CompiledOp(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CompiledOp::~CompiledOp() = default;

Result<std::unique_ptr<const CompiledOp>> CompiledOp::compile(const te_fl_op_schema& schema) {
  ensure_environment();  // so that check() need not ask whether TE_FL_VALIDATE has been read
  auto impl = std::make_unique<Impl>();
  TE_FL_RETURN_IF_ERROR(impl->compile(schema));
  return std::unique_ptr<const CompiledOp>(new CompiledOp(std::move(impl)));
}

const te_fl_op_schema& CompiledOp::schema() const noexcept { return impl_->schema; }

bool CompiledOp::check(const void* args, Signature& out) const noexcept {
  if (impl_->fast != nullptr && fast_check(*impl_->fast, args, out)) return true;
  return Finder(*impl_, args).run(out);
}

bool CompiledOp::check(const void* args, Signature& out, CheckMemo& memo) const noexcept {
  CheckMemo::Slot* slot = nullptr;
  if (impl_->fast != nullptr) {
    if (check_known(*impl_->fast, args, memo, out, slot)) return true;
    if (fast_check(*impl_->fast, args, out)) {
      if (slot != nullptr) remember(*impl_->fast, args, out, *slot);
      return true;
    }
  }
  return Finder(*impl_, args).run(out);
}

void remember_exactly(const CompiledOp& op, const void* args, ExactMemo& memo) noexcept {
  memo.forget();
  const te_fl_op_schema& schema = op.schema();
  const ArgsView view(args);
  const uint32_t size = view.size();
  // Padding may hold anything; such structs are merely recognised less often.
  if (size > ExactMemo::kMaxArgs || size % 8 != 0) return;
  uint32_t count = 0;
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *schema.args[i];
    // What lies behind other pointers is not compared.
    if (arg.type == TE_FL_ARG_TENSOR_LIST || arg.type == TE_FL_ARG_SAVED ||
        arg.type == TE_FL_ARG_COMMUNICATOR) {
      return;
    }
    if (arg.type != TE_FL_ARG_TENSOR || arg.offset + sizeof(void*) > size) continue;
    const auto* t = view.read<const te_fl_tensor*>(arg.offset);
    if (t == nullptr) continue;
    if (t->struct_size < sizeof(te_fl_tensor) || count == ExactMemo::kMaxTensors) return;
    const te_fl_dltensor& dl = t->dl;
    const bool plain = t->quant == nullptr && dl.strides == nullptr &&
                       dl.ndim <= static_cast<int32_t>(ExactMemo::kMaxRank);
    if (!plain) return;
    ExactMemo::One& one = memo.tensors_[count++];
    std::memcpy(one.bytes, t, sizeof(te_fl_tensor));
    one.tensor = t;
    one.shape = dl.shape;
    one.rank = static_cast<uint32_t>(dl.ndim);
    for (int32_t d = 0; d < dl.ndim; ++d) one.extents[d] = dl.shape[d];
  }
  std::memcpy(memo.args_, args, size);
  memo.count_ = count;
  memo.size_ = size;
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

// Summary, formula and source are prose: they may be reworded.
bool CompiledOp::same_as(const te_fl_op_schema& other) const {
  const te_fl_op_schema& mine = impl_->schema;
  if (other.struct_size < kLeastSchema || !same_text(mine.name, other.name) ||
      mine.flags != other.flags || mine.args_size != other.args_size ||
      mine.least_args_size != other.least_args_size || mine.arg_count != other.arg_count) {
    return false;
  }
  if (mine.arg_count > 0 && other.args == nullptr) return false;
  for (uint32_t i = 0; i < mine.arg_count; ++i) {
    const te_fl_arg_desc* arg = other.args[i];
    if (arg == nullptr || arg->struct_size < kLeastArgDesc) return false;
    if (!same_arg(*mine.args[i], *arg)) return false;
  }
  return true;
}

}  // namespace te_fl::core
