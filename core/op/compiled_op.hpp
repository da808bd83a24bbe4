#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "core/op/constraint.hpp"
#include "core/op/op_table.hpp"
#include "core/op/shape_rule.hpp"

// The private members of CompiledOp, for the files of the op table only.
namespace te_fl::core {

inline constexpr uint32_t kMaxArgs = 64;
inline constexpr uint32_t kMaxLaterArgs = 16;  // R23: one bit of Signature::later for each
inline constexpr uint32_t kMaxArgsSize = 1u << 15;
inline constexpr size_t kMaxTextLength = 4096;  // longest string of a schema; longer ones are cut
inline constexpr uint32_t kMaxListCount = 1u << 24;

// The dtypes whose values need a scale.
inline constexpr uint64_t kScaledDTypes = TE_FL_MASK_FP8 | TE_FL_BIT(TE_FL_F4E2M1);

struct Arg {
  te_fl_arg_type type = TE_FL_ARG_TENSOR;
  te_fl_arg_role role = TE_FL_IN;
  uint16_t later = 0;  // bit in Signature::later; 0: argument of the op's first version
  uint32_t flags = 0;
  uint32_t offset = 0;
  uint32_t count_offset = 0;
  uint32_t end = 0;  // the smallest caller struct_size that contains the argument
  uint64_t dtypes = 0;
  uint32_t scalings = 0;
  int8_t inout_if = -1;
  int8_t same_as = -1;
  uint64_t may_alias = 0;  // arguments that may share memory with this one
  ShapeRule shape;
  // For scalars. Bounds are inclusive; infinite if there are none.
  double low = 0, high = 0, neutral = 0;
  int64_t int_low = 0, int_high = 0;

  bool is(uint32_t flag) const noexcept { return (flags & flag) != 0; }
  bool is_tensor() const noexcept { return type == TE_FL_ARG_TENSOR; }
  bool is_list() const noexcept { return type == TE_FL_ARG_TENSOR_LIST; }
  bool is_integers() const noexcept { return type == TE_FL_ARG_I64_LIST; }
  bool writes() const noexcept { return role != TE_FL_IN; }
  // True if the argument's memory determines the device that the op runs on.
  bool places() const noexcept { return !is(TE_FL_ARG_HOST | TE_FL_ARG_ANY_MEMORY); }
};

// Reads a caller's argument struct within its struct_size.
class ArgsView {
 public:
  explicit ArgsView(const void* args) noexcept : base_(static_cast<const std::byte*>(args)) {
    std::memcpy(&size_, base_, sizeof size_);
  }
  uint32_t size() const noexcept { return size_; }
  bool has(const Arg& arg) const noexcept { return arg.end <= size_; }
  template <class T>
  T read(uint32_t offset) const noexcept {
    T value;
    std::memcpy(&value, base_ + offset, sizeof value);
    return value;
  }
  const te_fl_tensor* tensor(const Arg& arg) const noexcept {
    return has(arg) ? read<const te_fl_tensor*>(arg.offset) : nullptr;
  }
  int64_t count(const Arg& arg) const noexcept {
    return has(arg) ? read<int64_t>(arg.count_offset) : 0;
  }
  const te_fl_tensor* element(const Arg& arg, int64_t i) const noexcept {
    return read<const te_fl_tensor* const*>(arg.offset)[i];
  }
  // Element i of a list of integers, which must be present.
  int64_t integer(const Arg& arg, int64_t i) const noexcept {
    return read<const int64_t*>(arg.offset)[i];
  }
  // A scalar as a double; its neutral value if the struct is too short. Integers above 2^53 are
  // compared exactly in other functions.
  double scalar(const Arg& arg) const noexcept {
    if (!has(arg)) return arg.neutral;
    switch (arg.type) {
      case TE_FL_ARG_I64:
        return static_cast<double>(read<int64_t>(arg.offset));
      case TE_FL_ARG_F32:
        return read<float>(arg.offset);
      case TE_FL_ARG_F64:
        return read<double>(arg.offset);
      default:
        return read<int32_t>(arg.offset);
    }
  }
  bool flag(const Arg& arg) const noexcept { return scalar(arg) != 0; }
  // True if the argument is absent or has its neutral value.
  bool is_neutral(const Arg& arg) const noexcept;

 private:
  const std::byte* base_;
  uint32_t size_ = 0;
};

struct CallLayout;  // defined in core/op/call_words.hpp

struct CompiledOp::Impl {
  Impl();
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  te_fl_op_schema schema{};
  // Storage of the deep copy that `schema` points to.
  std::deque<std::string> strings;
  std::deque<te_fl_arg_desc> descs;
  std::vector<const te_fl_arg_desc*> desc_pointers;

  std::vector<Arg> args;
  std::vector<uint8_t> tensors;  // plain tensors, in the order of shape matching
  std::vector<uint8_t> lists;
  std::vector<uint8_t> scalars;
  std::vector<uint8_t> integers;  // lists of integers
  std::vector<Constraint> rules;
  bool rules_use_extents = false;  // a rule uses names of the shape rules
  std::vector<uint8_t> communicators;
  SymbolNames symbols;
  int saved = -1;
  bool enquiry = false;
  uint32_t later_count = 0;  // number of arguments added after the op's first version
  std::unique_ptr<const CallLayout> layout;

  // True if the op reads the argument's current contents.
  bool reads(const Arg& arg, const ArgsView& view) const noexcept {
    if (arg.role != TE_FL_INOUT) return arg.role == TE_FL_IN;
    return arg.inout_if < 0 || view.flag(args[static_cast<size_t>(arg.inout_if)]);
  }
  // True if the argument's contents before the call matter: the op reads them, or may leave them
  // unchanged.
  bool needs_contents(const Arg& arg, const ArgsView& view) const noexcept {
    if (arg.role != TE_FL_OUT) return reads(arg, view);
    return arg.inout_if >= 0 && view.tensor(args[static_cast<size_t>(arg.inout_if)]) != nullptr;
  }
  // The extents that a shape rule requires in a call whose bools and enums are valid.
  const Dims& rule_dims(const ShapeRule& rule, const ArgsView& view) const noexcept {
    return rule.chosen([&](uint8_t i) { return static_cast<int32_t>(view.scalar(args[i])); });
  }
  const char* name_of(int arg) const noexcept { return descs[static_cast<size_t>(arg)].name; }
  Status compile(const te_fl_op_schema& from);
  Status copy_schema(const te_fl_op_schema& from);
  Status compile_arg(uint32_t index);
  Status compile_scalar(const te_fl_arg_desc& desc, Arg& arg);
  Status compile_references(uint32_t index);
  Status compile_rules();
  Status check_layout() const;
  void order_tensors();
  int find_arg(std::string_view name) const;
  ShapeNames shape_names() const;
};

// Splits a text at blanks.
std::vector<std::string> words(std::string_view text);

// Merges the devices of two tensors of one call; false if they differ. Pinned memory is compatible
// with the host and with its own device.
bool merge_devices(Device& into, const Device& next) noexcept;

}  // namespace te_fl::core
