#include "te_fl/nn/init.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

namespace te_fl::nn::init {
namespace {

uint64_t splitmix(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// In (0, 1].
double uniform(uint64_t& state) {
  return (static_cast<double>(splitmix(state) >> 11) + 1) * 0x1p-53;
}

// F32 [elements of `shape`] on the host, to be filled.
Result<Tensor> host_values(std::span<const int64_t> shape) {
  int64_t total = 1;
  for (int64_t extent : shape) {
    if (extent < 1) {
      return invalid_argument("a parameter's extent is " + std::to_string(extent) +
                              "; it must be at least 1");
    }
    if (__builtin_mul_overflow(total, extent, &total)) {
      return invalid_argument("a parameter's number of elements does not fit 63 bits");
    }
  }
  return Tensor::empty({total}, DType::kF32);
}

Result<std::shared_ptr<Parameter>> make(std::span<const int64_t> shape, Tensor values, DType dtype,
                                        Device device) {
  if (!is_high(dtype)) {
    return invalid_argument("a parameter's dtype is " + std::string(name(dtype)) +
                            "; it must be f32, bf16 or f16");
  }
  if (dtype != DType::kF32) {
    const std::span<const float> floats(values.data<float>(), static_cast<size_t>(values.numel()));
    TE_FL_ASSIGN_OR_RETURN(values, Tensor::from_values({values.numel()}, floats, dtype));
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor shaped, values.view(shape));
  auto parameter = std::make_shared<Parameter>();
  if (device.is_host()) {
    parameter->value = std::move(shaped);
  } else {
    TE_FL_ASSIGN_OR_RETURN(parameter->value, shaped.to(device));
  }
  return parameter;
}

}  // namespace

uint64_t subseed(uint64_t seed, uint64_t index) {
  uint64_t state = seed ^ (index + 1) * 0xd1342543de82ef95ull;
  return splitmix(state);
}

Result<std::shared_ptr<Parameter>> normal(std::span<const int64_t> shape, float std, uint64_t seed,
                                          DType dtype, Device device) {
  if (!(std >= 0) || !std::isfinite(std)) {
    return invalid_argument("a parameter's initial standard deviation is " + std::to_string(std) +
                            "; it must be finite and at least 0");
  }
  TE_FL_ASSIGN_OR_RETURN(Tensor made, host_values(shape));
  const int64_t total = made.numel();
  auto* values = made.data<float>();
  uint64_t state = seed;
  for (int64_t i = 0; i < total; i += 2) {
    const double radius = std * std::sqrt(-2 * std::log(uniform(state)));
    const double angle = 2 * std::numbers::pi * uniform(state);
    values[i] = static_cast<float>(radius * std::cos(angle));
    if (i + 1 < total) values[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
  return make(shape, std::move(made), dtype, device);
}

Result<std::shared_ptr<Parameter>> constant(std::span<const int64_t> shape, float value,
                                            DType dtype, Device device) {
  TE_FL_ASSIGN_OR_RETURN(Tensor made, host_values(shape));
  std::fill_n(made.data<float>(), made.numel(), value);
  return make(shape, std::move(made), dtype, device);
}

Result<Tensor> rotary_angles(const RotaryOptions& options) {
  if (options.dim < 2 || options.dim % 2 != 0) {
    return invalid_argument("rotary_angles: dim is " + std::to_string(options.dim) +
                            "; it must be even and at least 2");
  }
  if (options.max_seqlen < 1 || !(options.base > 0)) {
    return invalid_argument("rotary_angles: max_seqlen is " + std::to_string(options.max_seqlen) +
                            " and base " + std::to_string(options.base) +
                            "; they must be at least 1 and greater than 0");
  }
  const int64_t half = options.dim / 2;
  TE_FL_ASSIGN_OR_RETURN(Tensor host,
                         Tensor::empty({options.max_seqlen, 1, 1, options.dim}, DType::kF32));
  for (int64_t position = 0; position < options.max_seqlen; ++position) {
    float* row = host.data<float>() + position * options.dim;
    for (int64_t pair = 0; pair < half; ++pair) {
      const double frequency = std::pow(
          options.base, -2.0 * static_cast<double>(pair) / static_cast<double>(options.dim));
      const float angle = static_cast<float>(static_cast<double>(position) * frequency);
      row[options.interleaved ? 2 * pair : pair] = angle;
      row[options.interleaved ? 2 * pair + 1 : pair + half] = angle;
    }
  }
  if (options.device.is_host()) return host;
  return host.to(options.device);
}

}  // namespace te_fl::nn::init
