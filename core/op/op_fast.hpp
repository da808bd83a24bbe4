#pragma once

#include <vector>

#include "core/op/compiled_op.hpp"

// The hot path of CompiledOp::check(): one pass over flat tables that recognises calls which are in
// order. It need not recognise them all; what it leaves open, the Finder decides. It never accepts
// what the Finder would refuse: tests/core/op/op_fast_test.cpp compares the two.
namespace te_fl::core {

inline constexpr size_t kMaxFastTensors = 32;
inline constexpr size_t kLanes = 4;

struct FastTerm {
  Term::Kind kind;
  uint8_t symbol;
  int32_t value;
};

// How a tensor's shape is matched: the frequent rules have code of their own.
enum class FastShape : uint8_t {
  kAny,
  kSame,         // as an earlier, required tensor's, whose rule reads the same
  kLeading,      // "..."
  kLeadingName,  // "... H"
  kName,         // "H"
  kProduct,      // "@..."
  kTerms,        // anything else
};

// The terms of one form of a shape rule.
struct FastDims {
  uint16_t first = 0;  // in FastOp::terms
  uint8_t count = 0;
  bool leading = false;
};

struct FastTensor {
  uint32_t offset;
  uint32_t refused_dtypes;  // without quantisation data
  uint32_t quant_dtypes;    // allowed with quantisation data
  uint64_t place_mask;      // all ones if the device must be the common one, else 0
  FastShape shape;
  uint8_t symbol;  // kLeadingName, kName
  bool optional;
  bool allows_overlap;
  uint8_t arg;           // index in the op's arguments
  uint32_t same_offset;  // kSame: of the tensor to compare with
  uint32_t flag_offset;  // of the bool that chooses between the two forms; 0: the first
  FastDims dims[2];
};

struct FastScalar {
  uint32_t offset;
  bool is_float;
  bool wide;  // 64 bits
  int64_t low;
  uint64_t span;  // high - low
  double float_low, float_high;
};

// A rule between arguments, and how one load shows that most calls cannot break it: their bytes at
// `offset` are those with which its left side does not hold.
struct FastRule {
  enum Glance : uint8_t {
    kWord,   // 32 bits that equal `idle`
    kWide,   // 64 bits that equal `idle`
    kValue,  // an enum's value whose bit is set in `idle`
    kQuant,  // a tensor without quantisation data, or none
    kLook    // none shows it
  };
  uint32_t offset = 0;
  Glance glance = kLook;
  uint64_t idle = 0;
  const Constraint* rule = nullptr;
};

struct FastPair {
  uint8_t a, b;
};

// An output, and in which lanes there are tensors that may not begin where it begins.
struct FastOutput {
  alignas(16) uint32_t forbidden[kMaxFastTensors];
  uint8_t tensor;
};

struct FastOp {
  const CompiledOp::Impl* op = nullptr;
  uint64_t number = 0;  // unique in the process, never given again
  uint32_t args_size = 0;
  uint32_t anchor_offset = 0;  // a required tensor whose device all others must have
  uint32_t saved_offset = 0;   // 0: none
  uint32_t symbol_count = 0;
  bool uses_product = false;
  size_t lanes = 0;        // tensors, rounded up to kLanes
  bool memorable = false;  // CheckMemo has room for its tensors
  std::vector<FastTensor> tensors;
  std::vector<FastTerm> terms;
  std::vector<uint32_t> word_offsets;  // of the scalars that shape rules and rules read, in words
  std::vector<uint32_t> host_offsets;  // tensors that must be in host memory
  std::vector<FastScalar> scalars;
  std::vector<FastOutput> outputs;
  std::vector<FastPair> same_dtype;  // must have one dtype
  std::vector<FastRule> rules;
};

}  // namespace te_fl::core
