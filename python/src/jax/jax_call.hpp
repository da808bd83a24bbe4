// The text form of one op call. te_fl.jax embeds the text in an XLA program:
//
//   layernorm_fwd x gamma -> z z.scale_inv z.amax mu rsigma | epsilon=1e-06 z.scaling=tensor
//
// The words before the arrow name XLA's operands, and the words after it XLA's results, in order. A
// word is an argument, an element of a list (inputs[0]), a part of a quantised tensor
// (z.scale_inv), or `rng`, uint32 [4]: the seed and the offset, low words first. After the first
// bar come the scalars and the scaling of quantised tensors (NAME.scaling, .compute_scale,
// .pow2_scale, .amax_epsilon). After a second bar comes the te_fl.policy that was in force when the
// program was traced. A process needs nothing but this text to run the op, so compiled programs can
// be cached and exported.
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

// One operand or result buffer of XLA.
struct Array {
  te_fl_dtype dtype;
  void* data;
  int32_t rank;
  int64_t* extents;
};

// The arguments of one call. parse() builds them from the text once; each run() then fills in the
// addresses. Not thread-safe; the object must not move.
class OpCall {
 public:
  static Result<std::unique_ptr<OpCall>> parse(std::string_view text);
  size_t operands() const noexcept { return operands_.size(); }
  size_t results() const noexcept { return results_.size(); }
  // Runs the op on these arrays, all in memory of `device`. The process's policy applies, with the
  // settings in the parsed text on top; policy scopes that Python opened on the calling thread do
  // not apply.
  Status run(const Array* operands, const Array* results, const Device& device, void* stream);
  // Returns the choice that run() would make for arrays of these shapes, under the same policy, and
  // runs nothing. Sets the arrays' addresses. The device may be absent.
  Result<Decision> resolve(std::vector<Array>& operands, std::vector<Array>& results,
                           const Device& device);

 private:
  // A tensor argument and the arrays that make it up.
  struct TensorSlot {
    te_fl_tensor tensor;
    te_fl_quant quant;
    // Logical shape; used if the tensor has only column-wise data.
    std::array<int64_t, 2> shape{};
  };
  // The purpose of one XLA array: a tensor's codes, a pointer in its te_fl_quant, or the random
  // state.
  struct Use {
    TensorSlot* slot = nullptr;  // null: the random state
    int part = -1;               // index into kParts; -1: the tensor's own data
    int same_as = -1;            // index of the operand that this result aliases; -1: none
  };

  Status read(std::string_view text);
  Status read_arrays(std::string_view words, bool results);
  Status read_setting(std::string_view name, std::string_view value);
  Status read_scalar(const te_fl_arg_desc& arg, std::string_view value);
  Status read_quantisation(TensorSlot& slot, std::string_view what, std::string_view value);
  Result<TensorSlot*> find_slot(std::string_view name);
  const te_fl_arg_desc* find(std::string_view name) const noexcept;
  void bind(const Use& use, const Array& array, const Device& device) noexcept;
  // Returns an error if the array's extents differ from those that the part, or the random state,
  // needs.
  Status check(const Use& use, const Array& array, const std::string& name) const;
  // Fills in the arrays' addresses and checks their extents.
  Status bind_all(const Array* operands, const Array* results, const Device& device);
  // Returns f(manager) under the policy that applies to the call. T is Status or a Result.
  template <class T, class F>
  T under_policy(F&& f) const;
  CallOptions options(void* stream) const noexcept;

  OpId op_;
  const te_fl_op_schema* schema_ = nullptr;
  std::vector<std::byte> args_;
  std::vector<Use> operands_, results_;
  // A std::map, so addresses of the slots stay valid.
  std::map<std::string, TensorSlot, std::less<>> slots_;
  std::map<std::string, std::vector<const te_fl_tensor*>, std::less<>> lists_;
  std::deque<std::vector<int64_t>> integers_;
  std::vector<std::string> operand_names_, result_names_;
  std::optional<python::LinePolicy> policy_;
  const uint64_t* random_ = nullptr;
};

}  // namespace te_fl::jax
