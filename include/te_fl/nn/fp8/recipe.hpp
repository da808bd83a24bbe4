#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>

#include "te_fl/dtype.hpp"
#include "te_fl/export.hpp"
#include "te_fl/status.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {

// Says which FP8 type holds what. kHybrid: E4M3 for inputs and weights, E5M2 for gradients. (E5M2
// throughout cannot train.)
enum class Fp8Format : uint8_t { kHybrid, kE4M3 };

enum class AmaxAlgo : uint8_t { kMax, kMostRecent };

// An amax for each of a site's tensors from their histories, in place of an AmaxAlgo. `history`
// F32 [length, tensors]: row 0 has this step's amaxes, the rows after it older ones, the newest
// last. Writes `amax`, F32 [tensors]. Both are on the site's device: what it enqueues goes on the
// thread's current stream and is captured where the step is; only outside of a capture can it read
// them on the host (Tensor::to). History and amax are valid during the call. An error is that of
// the autocast's end or of backward_end().
struct AmaxFunction {
  std::string name;  // for messages
  std::function<Status(const Tensor& history, const Tensor& amax)> compute;
  // If set, in place of fp8_max * 2^-margin / amax: writes the new scales over those of now,
  // `scale`, F32 [tensors]. fp8_max: the largest finite value of the tensors' FP8 type. Devices,
  // streams and errors are as for compute.
  std::function<Status(const Tensor& amax, const Tensor& scale, float fp8_max)> compute_scale =
      nullptr;
};

// Per-tensor scales from the amaxes of earlier steps: scale = fp8_max * 2^-margin / amax(history).
struct DelayedScaling {
  int margin = 0;
  Fp8Format format = Fp8Format::kHybrid;
  int64_t amax_history_len = 1024;  // at least 1
  AmaxAlgo amax_compute_algo = AmaxAlgo::kMax;
  bool fp8_dpa =
      false;  // attention itself in FP8: Q, K, V, O in E4M3, their gradients in E5M2 (kE4M3: E4M3)
  // If not null: in place of amax_compute_algo, which then stays kMax. Equal recipes share it.
  std::shared_ptr<const AmaxFunction> amax_function = nullptr;
  friend bool operator==(const DelayedScaling&, const DelayedScaling&) = default;
};

// Per-tensor scales from the tensor's own amax.
struct Float8CurrentScaling {
  Fp8Format format = Fp8Format::kHybrid;
  bool pow2_scale = false;  // truncate scales to powers of two
  float amax_epsilon = 0;   // lower bound of the amax
  friend bool operator==(const Float8CurrentScaling&, const Float8CurrentScaling&) = default;
};

// One scale per block: 1x128 for inputs and gradients, 128x128 for weights.
struct Float8BlockScaling {
  bool pow2_scale = true;
  float amax_epsilon = 0;
  Fp8Format format = Fp8Format::kE4M3;
  friend bool operator==(const Float8BlockScaling&, const Float8BlockScaling&) = default;
};

using Recipe = std::variant<DelayedScaling, Float8CurrentScaling, Float8BlockScaling>;

// INVALID_ARGUMENT names the field, its value and its range.
TE_FL_API Status validate(const Recipe& recipe);
// "delayed scaling (hybrid, margin 0, history 1024, max)"
TE_FL_API std::string describe(const Recipe& recipe);
// "delayed", "current", "block": that recipe with its defaults; any other word is an error that
// names the nearest.
TE_FL_API Result<Recipe> parse_recipe(std::string_view text);

}  // namespace te_fl::nn
