// An op's call as the text that te_fl.jax puts into an XLA program:
//
//   layernorm_fwd x gamma -> z z.scale_inv z.amax mu rsigma | epsilon=1e-06 z.scaling=tensor
//
// The words before the arrow name what each operand of XLA's is, those after it each result: an
// argument, an element of a list (inputs[0]), a part of a quantised tensor (z.scale_inv), or `rng`,
// uint32 [4]: the seed and the offset, low words first. Then come scalars, and how quantised
// tensors are scaled (NAME.scaling, .compute_scale, .pow2_scale, .amax_epsilon); after a second bar
// what te_fl.policy asked for where the program was traced. The text says everything that a process
// needs, so compiled programs can be kept and exported.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/policy.hpp"
#include "te_fl/device.hpp"
#include "te_fl/op_manager.hpp"
#include "te_fl/status.hpp"

namespace te_fl::jax {

// One array of XLA's.
struct Array {
  te_fl_dtype dtype;
  void* data;
  int32_t rank;
  int64_t* extents;
};

// The arguments of one call, made from its text once and then given memory call by call. Not
// thread-safe; the object must not move.
class OpCall {
 public:
  static Result<std::unique_ptr<OpCall>> parse(std::string_view text);
  size_t operands() const noexcept { return operands_.size(); }
  size_t results() const noexcept { return results_.size(); }
  // Runs the op on these arrays, all in memory of `device`, under the process's policy and the
  // text's; scopes that Python opened on the calling thread do not apply.
  Status run(const Array* operands, const Array* results, const Device& device, void* stream);

 private:
  // A tensor argument with the arrays that it is made of.
  struct TensorSlot {
    te_fl_tensor tensor;
    te_fl_quant quant;
    std::array<int64_t, 2> shape{};  // of one that has only its column-wise copy
  };
  // The use of an array: a tensor's codes, a pointer in its te_fl_quant, or the random state.
  struct Use {
    TensorSlot* slot = nullptr;  // null: the random state
    int part = -1;               // into the parts' table; -1: the tensor's own data
    int same_as = -1;            // a result that is an operand too: which one
  };

  Status read(std::string_view text);
  Status read_arrays(std::string_view words, bool results);
  Status read_setting(std::string_view name, std::string_view value);
  Status read_scalar(const te_fl_arg_desc& arg, std::string_view value);
  Status read_quantisation(TensorSlot& slot, std::string_view what, std::string_view value);
  Result<TensorSlot*> slot_of(std::string_view name);
  const te_fl_arg_desc* find(std::string_view name) const noexcept;
  void bind(const Use& use, const Array& array, const Device& device) noexcept;
  // An error if a part, or the random state, has other extents than its reader takes it to have.
  Status check(const Use& use, const Array& array, const std::string& name) const;

  OpId op_;
  const te_fl_op_schema* schema_ = nullptr;
  std::vector<std::byte> args_;
  std::vector<Use> operands_, results_;
  std::map<std::string, TensorSlot, std::less<>> slots_;  // addresses stay
  std::map<std::string, std::vector<const te_fl_tensor*>, std::less<>> lists_;
  std::deque<std::vector<int64_t>> integers_;
  std::vector<std::string> operand_names_, result_names_;
  std::optional<python::LinePolicy> policy_;
  const uint64_t* random_ = nullptr;
};

}  // namespace te_fl::jax
