#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "te_fl/export.hpp"
#include "te_fl/nn/module.hpp"
#include "te_fl/tensor.hpp"

// Initial values: data made on the host by all its cores, in FP32, then converted and copied to the
// device. A value is a function of the seed and of its element's index alone, so the same seed
// gives the same values on every device, and a shard has those that the whole has there.
namespace te_fl::nn::init {

// Where a parameter lies in a larger one whose shard it is, e.g. the rows [begin, begin + extent)
// of a weight; empty: it is whole.
struct Shard {
  Shape whole;  // the extents of the whole
  Shape begin;  // the index in it of the shard's first element
};

// While one is alive, the parameters of modules that the thread creates have shape, dtype and
// device but no memory, to be borrowed (Parameter::borrow()) before the first forward, which is
// INVALID_ARGUMENT without.
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
