#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "te_fl/export.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/tensor.hpp"

// Initial values of parameters. They are computed on the host in FP32, with all cores, then
// converted and copied to the device. Each value depends only on the seed and the element's index.
// The same seed therefore gives the same values on every device, and a shard gets the values of the
// full tensor at the shard's position.
namespace te_fl::nn::init {

using Shard = nn::Shard;

// While this scope is alive, parameters of modules that the thread creates have shape, dtype and
// device but no memory. Parameter::borrow() must give them memory before the first forward, which
// otherwise returns INVALID_ARGUMENT.
class TE_FL_API WithoutValues {
 public:
  WithoutValues();
  ~WithoutValues();
  WithoutValues(const WithoutValues&) = delete;
  WithoutValues& operator=(const WithoutValues&) = delete;
};

// A parameter with normally distributed values of mean 0 and standard deviation `std`.
TE_FL_API Result<std::shared_ptr<Parameter>> normal(std::span<const int64_t> shape, float std,
                                                    uint64_t seed, DType dtype, Device device,
                                                    const Shard& shard = {});
// A parameter whose elements all are `value`.
TE_FL_API Result<std::shared_ptr<Parameter>> constant(std::span<const int64_t> shape, float value,
                                                      DType dtype, Device device);
// An independent seed for the index-th parameter or submodule of a module seeded with `seed`.
TE_FL_API uint64_t subseed(uint64_t seed, uint64_t index);

// Methods to extend rotary angles beyond the positions that a model was trained with. f(i) =
// base^(-2i/dim) is the original frequency of pair i; `factor` is the ratio of the new length to
// the trained length.
enum class RotaryScaling : uint8_t {
  kNone,
  // Position interpolation (arXiv 2306.15595): f(i) / factor.
  kLinear,
  // NTK-aware (arXiv 2309.00071, section 3.1): multiplies the base by factor^(dim / (dim - 2)), so
  // that the slowest pair is interpolated and the fastest is unchanged.
  kNtk,
  // YaRN, NTK by parts (arXiv 2309.00071, section 3.2): a pair that makes at least beta_fast turns
  // within original_max_positions keeps f(i); a pair that makes at most beta_slow turns gets f(i) /
  // factor; between them a linear ramp over the pair's index mixes both. See yarn_softmax_scale().
  kYarn,
  // Llama 3.1 (rope_scaling in its model card): like YaRN, with high_freq_factor and
  // low_freq_factor turns, and a ramp over the number of turns.
  kLlama3,
};

struct RotaryOptions {
  int64_t dim = 0;         // rotated columns of a head; even
  int64_t max_seqlen = 0;  // number of positions
  double base = 10000;
  bool interleaved = false;  // pairs are (2i, 2i+1) instead of (i, i + dim/2)
  Device device = {};
  int64_t first_position = 0;  // position of row 0
  RotaryScaling scaling = RotaryScaling::kNone;
  double factor = 1;  // at least 1
  // only for kYarn and kLlama3: number of positions that the model was trained with
  int64_t original_max_positions = 0;
  double beta_fast = 32, beta_slow = 1;              // only for kYarn
  double high_freq_factor = 4, low_freq_factor = 1;  // only for kLlama3
};
// Angles for RoPE, F32 [max_seqlen, 1, 1, dim]: angle(s, pair i) = (first_position + s) * f(i), in
// both columns of a pair.
TE_FL_API Result<Tensor> rotary_angles(const RotaryOptions& options);
// The factor by which YaRN multiplies the softmax scale (arXiv 2309.00071, section 3.4): (0.1 ln
// factor + 1)^2.
TE_FL_API double yarn_softmax_scale(double factor) noexcept;

}  // namespace te_fl::nn::init
