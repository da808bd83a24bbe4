#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "te_fl/export.hpp"
#include "te_fl/nn/module.hpp"
#include "te_fl/tensor.hpp"

// Initial values: data made on the host, in FP32, then converted and copied to the device. The same
// seed gives the same values on every device.
namespace te_fl::nn::init {

// A parameter with normally distributed values of mean 0 and standard deviation `std`.
TE_FL_API Result<std::shared_ptr<Parameter>> normal(std::span<const int64_t> shape, float std,
                                                    uint64_t seed, DType dtype, Device device);
// Every element `value`.
TE_FL_API Result<std::shared_ptr<Parameter>> constant(std::span<const int64_t> shape, float value,
                                                      DType dtype, Device device);
// An independent seed for the index-th parameter or submodule of a module seeded with `seed`.
TE_FL_API uint64_t subseed(uint64_t seed, uint64_t index);

struct RotaryOptions {
  int64_t dim = 0;         // rotated columns of a head, even
  int64_t max_seqlen = 0;  // positions
  double base = 10000;
  bool interleaved = false;  // pairs are (2i, 2i+1) instead of (i, i + dim/2)
  Device device = {};
};
// Angles for RoPE, F32 [max_seqlen, 1, 1, dim]: angle(s, pair i) = s * base^(-2i/dim), in both
// columns of a pair.
TE_FL_API Result<Tensor> rotary_angles(const RotaryOptions& options);

}  // namespace te_fl::nn::init
