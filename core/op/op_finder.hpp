#pragma once

#include <cstdint>

#include "core/base/abi_struct.hpp"
#include "core/op/compiled_op.hpp"
#include "te_fl/dtype.hpp"

// The exact check of a call: finds the first mistake, in codes and without allocating;
// core/op/op_message.cpp puts it into words.
namespace te_fl::core {

enum class Problem : uint8_t {
  kNone,
  kNullArgs,
  kArgsSize,
  // scalars
  kBool,
  kEnum,
  kRange,
  kNan,
  // one tensor
  kMissing,
  kTensorSize,
  kRank,
  kNullShape,
  kNegativeExtent,
  kTooLarge,
  kDType,
  kQuantSize,
  kUnknownScaling,
  kUnknownFlags,
  kScaling,
  kMissingQuant,
  kQuantDType,
  kQuantStrided,
  kNoCopy,
  kNoScaleInv,
  kNoColumnwiseScaleInv,
  kNoScale,
  kNoAmax,
  kColumnwiseAmax,
  kPartAlignment,
  kNullData,
  kAlignment,
  kSelfOverlap,
  kBroadcast,
  kPackedStrided,
  kNotHost,
  // between arguments
  kSameDType,
  kDevice,
  kShapeRank,
  kShape,
  kAlias,
  kPartialOverlap,
  kNotItsMemory,
  // lists
  kNegativeCount,
  kLongList,
  kNullList,
  kListCounts,
  kNoIntegers,
  kIntegerRange,
  // rules between arguments
  kRule,
  // saved record
  kMissingSaved,
  kSavedSize,
  kSavedStorage,
  // communicators
  kMissingCommunicator,
  kCommunicatorSize,
  kCommunicatorRank,
  kCommunicatorMaker,
  kCommunicatorDevice,
};

struct Finding {
  Problem problem = Problem::kNone;
  int arg = -1;
  int64_t index = -1;  // of a list's element
  int other = -1;      // the argument that it does not go with
  int dim = -1;        // kRule: which rule
};

// Values of the names in shape rules, and who set them.
struct Frame {
  int64_t values[kMaxSymbols];
  int8_t setter[kMaxSymbols];  // -1: not set
  const int64_t* leading = nullptr;
  int leading_count = -1;  // -1: not set
  int8_t leading_setter = -1;
  int64_t product = -1;
  int8_t product_setter = -1;
};

class Finder {
 public:
  Finder(const CompiledOp::Impl& op, const void* args) noexcept;
  // True if the call is in order.
  bool run(Signature& out) noexcept;
  // Checks again a call that was in order and of which only some numbers have changed. Fills the
  // later arguments alone.
  bool numbers(Signature& out) noexcept;
  // The signature without shapes, scalars, storage or aliasing.
  bool signature(Signature& out) noexcept;

  const Finding& finding() const noexcept { return finding_; }
  const Frame& frame() const noexcept { return frame_; }
  const Device& device() const noexcept { return device_; }
  int device_setter() const noexcept { return device_setter_; }
  const ArgsView& args() const noexcept { return args_; }
  // The tensor that the finding is about; null if none.
  const te_fl_tensor* tensor() const noexcept;
  // The tensor that it does not go with; for kSameDType.
  const te_fl_tensor* other_tensor() const noexcept;
  // True if the op reads the argument's present contents.
  bool reads(const Arg& arg) const noexcept;
  // kNotItsMemory: which part of the tensor, and what the device says of it.
  const char* part() const noexcept { return part_; }
  const char* detail() const noexcept { return detail_; }

 private:
  bool fail(Problem problem, int arg, int64_t index = -1, int other = -1, int dim = -1) noexcept;
  bool check_struct() noexcept;
  bool check_scalar(int i) noexcept;
  bool check_scalars() noexcept;
  bool check_integers() noexcept;
  bool check_rules() noexcept;
  bool check_tensors() noexcept;
  bool check_lists() noexcept;
  bool check_list_counts() noexcept;
  bool check_list_elements(int64_t index, const Frame& base) noexcept;
  bool check_saved() noexcept;
  bool check_communicators() noexcept;
  bool check_memory() noexcept;
  bool check_memory_of(int i, int64_t index, const te_fl_tensor* t) noexcept;
  static void keep_detail(void* finder, const char* text) noexcept;
  bool check_tensor(int i, int64_t index, const te_fl_tensor* t) noexcept;
  Problem inspect(const Arg& arg, const te_fl_tensor& t) const noexcept;
  Problem inspect_storage(const Arg& arg, const te_fl_tensor& t, int dtype) const noexcept;
  Problem inspect_strides(const Arg& arg, const te_fl_tensor& t, int dtype) const noexcept;
  bool place(int i, int64_t index, const te_fl_tensor& t) noexcept;
  bool match_shape(int i, int64_t index, const te_fl_tensor& t) noexcept;
  bool match_leading(int i, const te_fl_tensor& t, int count, int64_t index) noexcept;
  bool match_term(int i, const Term& term, int64_t extent) noexcept;
  const te_fl_tensor* partner(int j, int64_t index) const noexcept;
  bool check_same_dtype(int i, int64_t index, const te_fl_tensor& t) noexcept;
  bool check_aliases(int i, int64_t index, const te_fl_tensor& t) noexcept;
  bool check_other_elements(int i, int64_t index, const te_fl_tensor& t) noexcept;
  bool check_pair(int i, const te_fl_tensor& a, int j, const te_fl_tensor& b,
                  int64_t index) noexcept;
  void note(const Arg& arg, const te_fl_tensor& t) noexcept;

  const CompiledOp::Impl& op_;
  const void* raw_;
  ArgsView args_;
  Frame frame_;
  Finding finding_;
  Signature signature_;
  Device device_;
  int device_setter_ = -1;
  int64_t list_count_ = 0;
  const char* part_ = "";
  char detail_[200] = "";
};

// The quantisation data of a tensor whose struct sizes are in order; null if it says "not
// quantised".
inline const te_fl_quant* quant_of(const te_fl_tensor& t) noexcept {
  const te_fl_quant* q = t.struct_size >= kLeastTensor ? t.quant : nullptr;
  return q != nullptr && q->scaling != TE_FL_SCALING_NONE ? q : nullptr;
}
// Finds the first problem of the quantisation data of a tensor that has some and whose extents were
// checked.
Problem inspect_quant(const CompiledOp::Impl& op, const Arg& arg, const ArgsView& args,
                      const te_fl_tensor& t) noexcept;
// Elements; extents must not be negative nor overflow.
int64_t numel_of(const te_fl_tensor& t) noexcept;
bool is_compact(const te_fl_tensor& t) noexcept;
// First element, or the column-wise data if there is no row-wise copy; null for an empty tensor.
const char* first_byte(const te_fl_tensor& t) noexcept;
// The bytes between the first and the last that a non-empty tensor addresses.
struct ByteRange {
  const char* begin;
  const char* end;
};
ByteRange byte_range(const te_fl_tensor& t) noexcept;
// Exact tests for TE_FL_VALIDATE. False if they cannot tell.
bool overlaps_itself(const te_fl_tensor& t) noexcept;
bool overlap_partly(const te_fl_tensor& a, const te_fl_tensor& b, bool same_start_allowed) noexcept;

// The mistake in words, after "op: ".
std::string describe_finding(const CompiledOp::Impl& op, const Finder& finder);

}  // namespace te_fl::core
