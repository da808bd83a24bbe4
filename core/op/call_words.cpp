#include "core/op/call_words.hpp"

#include <algorithm>
#include <atomic>

namespace te_fl::core {
namespace {

std::atomic<uint64_t> g_numbers{1};

bool is_wide(const Arg& arg) { return arg.type == TE_FL_ARG_I64 || arg.type == TE_FL_ARG_F64; }

// True for a scalar whose value decides which other checks apply.
bool decides(const CompiledOp::Impl& op, size_t i) {
  const te_fl_arg_type type = op.args[i].type;
  if (type == TE_FL_ARG_BOOL || type == TE_FL_ARG_ENUM) return true;
  return std::any_of(op.args.begin(), op.args.end(),
                     [&](const Arg& a) { return a.inout_if == static_cast<int>(i); });
}

// Adds a scalar. Two adjacent 4-byte scalars of one kind become one 8-byte read.
void add_scalar(CallLayout& layout, const Arg& arg, bool structure) {
  const CallLayout::Scalar scalar{arg.offset, is_wide(arg), structure};
  if (!layout.scalars.empty()) {
    CallLayout::Scalar& last = layout.scalars.back();
    const bool joins = !last.wide && !scalar.wide && last.structure == scalar.structure;
    if (joins && last.offset + sizeof(uint32_t) == scalar.offset) {
      last.wide = true;
      return;
    }
  }
  layout.scalars.push_back(scalar);
}

CallLayout::Output make_output(const CompiledOp::Impl& op, const std::vector<uint8_t>& tensors,
                               uint32_t number) {
  CallLayout::Output output{};
  output.tensor = number;
  const Arg& arg = op.args[tensors[number]];
  for (uint32_t j = 0; j < tensors.size(); ++j) {
    if (j == number) continue;
    const bool allowed = (arg.may_alias >> tensors[j] & 1) != 0;
    (allowed ? output.allowed : output.forbidden)[j] = ~0u;
  }
  return output;
}

// The rule for two arguments at one address. kRead: the op only reads both arguments, so sharing
// does not matter.
enum class Alias { kRead, kAllowed, kForbidden };
Alias find_alias(const CompiledOp::Impl& op, uint8_t i, uint8_t j) {
  const Arg &a = op.args[i], &b = op.args[j];
  if (i == j || (!a.writes() && !b.writes())) return Alias::kRead;
  const bool allowed =
      (!a.writes() || (a.may_alias >> j & 1) != 0) && (!b.writes() || (b.may_alias >> i & 1) != 0);
  return allowed ? Alias::kAllowed : Alias::kForbidden;
}

void note_list_sharing(const CompiledOp::Impl& op, std::vector<uint8_t> slots,
                       const std::vector<uint8_t>& lists, CallLayout& layout) {
  slots.insert(slots.end(), lists.begin(), lists.end());
  for (size_t l = 0; l < lists.size(); ++l) {
    for (size_t j = 0; j < slots.size(); ++j) {
      const Alias alias = find_alias(op, lists[l], slots[j]);
      if (alias == Alias::kForbidden) layout.lists[l].forbidden |= uint64_t{1} << j;
      if (alias == Alias::kAllowed) layout.lists[l].allowed |= uint64_t{1} << j;
    }
  }
}

}  // namespace

CompiledOp::Impl::Impl() = default;
CompiledOp::Impl::~Impl() = default;

std::unique_ptr<const CallLayout> make_layout(const CompiledOp::Impl& op) {
  auto layout = std::make_unique<CallLayout>();
  layout->op = &op;
  layout->number = g_numbers.fetch_add(1, std::memory_order_relaxed);
  layout->args_size = op.schema.args_size;
  std::vector<uint8_t> tensors, lists;  // indices of arguments, as in layout->tensors and lists
  for (size_t i = 0; i < op.args.size(); ++i) {
    const Arg& arg = op.args[i];
    if (arg.is_tensor()) {
      layout->tensors.push_back(arg.offset);
      tensors.push_back(static_cast<uint8_t>(i));
      const bool is_hashed = !arg.is(TE_FL_ARG_OPTIONAL) && !arg.writes();
      if (is_hashed && layout->hashed.size() < CallLayout::kMaxHashed) {
        layout->hashed.push_back(arg.offset);
      }
    } else if (arg.is_list()) {
      layout->lists.push_back({arg.offset, arg.count_offset});
      lists.push_back(static_cast<uint8_t>(i));
    } else if (arg.is_integers()) {
      layout->integers.push_back({arg.offset, arg.count_offset});
    } else if (arg.type == TE_FL_ARG_COMMUNICATOR) {
      layout->communicators.push_back(arg.offset);
    } else if (arg.type == TE_FL_ARG_SAVED) {
      layout->saved = {arg.offset, arg.role == TE_FL_IN};
    } else {
      add_scalar(*layout, arg, decides(op, i));
    }
  }
  if (tensors.size() > CallLayout::kMaxTensors || lists.size() > CallLayout::kMaxLists)
    return layout;
  layout->lanes =
      (tensors.size() + CallLayout::kLanes - 1) / CallLayout::kLanes * CallLayout::kLanes;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    if (op.args[tensors[i]].writes()) layout->outputs.push_back(make_output(op, tensors, i));
  }
  note_list_sharing(op, tensors, lists, *layout);
  return layout;
}

}  // namespace te_fl::core
