#pragma once

#include <cstdint>

#include "core/base/abi_struct.hpp"
#include "core/op/compiled_op.hpp"
#include "te_fl/dtype.hpp"

// The full check of a call. Finds the first error and describes it by codes, without allocation;
// core/op/op_message.cpp produces the text.
namespace te_fl::core {

enum class Problem : uint8_t {
  kNone,
  kNullArgs,
  kArgsSize,
  // Errors of scalars.
  kBool,
  kEnum,
  kRange,
  kNan,
  // Errors of one tensor.
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
  // Errors between arguments.
  kSameDType,
  kDevice,
  kShapeRank,
  kShape,
  kAlias,
  kPartialOverlap,
  kNotItsMemory,
  // Errors of lists.
  kNegativeCount,
  kLongList,
  kNullList,
  kListCounts,
  kNoIntegers,
  kIntegerRange,
  // Errors of rules between arguments.
  kRule,
  // Errors of the saved record.
  kMissingSaved,
  kSavedSize,
  kSavedStorage,
  // Errors of communicators.
  kMissingCommunicator,
  kCommunicatorSize,
  kCommunicatorRank,
  kCommunicatorMaker,
  kCommunicatorDevice,
};

struct Finding {
  Problem problem = Problem::kNone;
  int arg = -1;
  int64_t index = -1;  // index of a list element
  int other = -1;      // the argument that conflicts with `arg`
  int dim = -1;        // the dimension; kRule: index of the rule
};

// The values of the names in shape rules, and for each the argument that set it.
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
  // Runs all checks; true if the call is valid.
  bool run(Signature& out) noexcept;
  // Checks the numbers of a call that was valid with other numbers. Fills only Signature::later.
  bool numbers(Signature& out) noexcept;
  // Computes the signature. Does not check shapes, scalars, storage or aliasing.
  bool signature(Signature& out) noexcept;

  const Finding& finding() const noexcept { return finding_; }
  const Frame& frame() const noexcept { return frame_; }
  const Device& device() const noexcept { return device_; }
  int device_setter() const noexcept { return device_setter_; }
  const ArgsView& args() const noexcept { return args_; }
  // The tensor that the error is about; null if it is not about a tensor.
  const te_fl_tensor* tensor() const noexcept;
  // For kSameDType: the tensor whose dtype differs from that of tensor().
  const te_fl_tensor* other_tensor() const noexcept;
  // True if the op reads the argument's current contents.
  bool reads(const Arg& arg) const noexcept;
  // For kNotItsMemory: the name of the tensor's memory block, and the device's error text.
  const char* part() const noexcept { return part_; }
  const char* detail() const noexcept { return detail_; }

 private:
  bool fail(Problem problem, int arg, int64_t index = -1, int other = -1, int dim = -1) noexcept;
  bool check_struct() noexcept;
  bool check_scalar(int i) noexcept;
  bool check_scalars() noexcept;
  bool check_integers() noexcept;
  bool check_rules() noexcept;
  bool bind_extents() noexcept;
  bool check_tensors() noexcept;
  bool check_lists() noexcept;
  bool check_list_counts() noexcept;
  bool check_list_elements(int64_t index, const Frame& base) noexcept;
  bool check_saved() noexcept;
  bool check_communicators() noexcept;
  bool check_memory() noexcept;
  bool check_argument_memory(int i, int64_t index, const te_fl_tensor* t) noexcept;
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

// The quantisation data of a tensor whose struct sizes were checked; null if the tensor is not
// quantised.
inline const te_fl_quant* quant_of(const te_fl_tensor& t) noexcept {
  const te_fl_quant* q = t.struct_size >= kLeastTensor ? t.quant : nullptr;
  return q != nullptr && q->scaling != TE_FL_SCALING_NONE ? q : nullptr;
}
// Finds the first error in the quantisation data of a quantised tensor whose extents were checked.
Problem inspect_quant(const CompiledOp::Impl& op, const Arg& arg, const ArgsView& args,
                      const te_fl_tensor& t) noexcept;
// The number of elements. Extents must not be negative, and the product must not overflow.
int64_t numel_of(const te_fl_tensor& t) noexcept;
bool is_compact(const te_fl_tensor& t) noexcept;
// The address of the first element; that of the column-wise data if there is no row-wise copy. Null
// for an empty tensor.
const char* first_byte(const te_fl_tensor& t) noexcept;
// The range of bytes that a non-empty tensor addresses.
struct ByteRange {
  const char* begin;
  const char* end;
};
ByteRange byte_range(const te_fl_tensor& t) noexcept;
// Exact overlap tests for TE_FL_VALIDATE. False also if the test cannot decide.
bool overlaps_itself(const te_fl_tensor& t) noexcept;
bool overlap_partly(const te_fl_tensor& a, const te_fl_tensor& b, bool same_start_allowed) noexcept;

// A call whose struct, scalars and tensors have each passed their own checks, for the rules between
// arguments. `frame` has the extents of its plain tensors.
struct RuleCall {
  const CompiledOp::Impl& op;
  const ArgsView& view;
  const Frame& frame;
};
// True if the call breaks the rule. A rule that uses a name that no given tensor has is not broken.
bool is_broken(const Constraint& rule, const RuleCall& call) noexcept;
// For a condition kEach: the index of the first two elements that break it; if none do, the length
// of the shorter list.
int64_t first_unlike(const Condition& each, const RuleCall& call) noexcept;
// The number of elements of all tensors of a list, and the sum of a list of integers.
int64_t elements_of_list(const Arg& list, const ArgsView& view) noexcept;
int64_t sum_of_list(const Arg& integers, const ArgsView& view) noexcept;
// The range of an integer dtype or of bool: [low, above_high). Not bounded for other dtypes.
struct IntegerRange {
  bool bounded = false;
  double low = 0, above_high = 0;
};
IntegerRange integer_range(int dtype) noexcept;

// The error as text, to be appended to "op: ".
std::string describe_finding(const CompiledOp::Impl& op, const Finder& finder);

}  // namespace te_fl::core
