#include "te_fl/nn/init.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <numbers>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/tensor/tensor_access.hpp"

namespace te_fl::nn::init {
namespace {

constexpr uint64_t kGamma = 0x9e3779b97f4a7c15ull;

// The index-th number of the SplitMix64 sequence of `seed`.
uint64_t number(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * kGamma;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// In (0, 1].
double uniform(uint64_t seed, uint64_t index) {
  return (static_cast<double>(number(seed, index) >> 11) + 1) * 0x1p-53;
}

// Elements [first, first + out.size()) of the sequence of normal numbers, pair by pair.
void normal_numbers(uint64_t seed, double std, uint64_t first, std::span<float> out) {
  for (size_t i = 0; i < out.size();) {
    const uint64_t at = first + i, pair = at & ~uint64_t{1};
    const double radius = std * std::sqrt(-2 * std::log(uniform(seed, pair)));
    const double angle = 2 * std::numbers::pi * uniform(seed, pair + 1);
    if (at == pair) out[i++] = static_cast<float>(radius * std::cos(angle));
    if (i < out.size()) out[i++] = static_cast<float>(radius * std::sin(angle));
  }
}

Result<int64_t> count_of(std::span<const int64_t> shape) {
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
  return total;
}

// Writes the elements [first, first + out.size()).
using Values = std::function<void(int64_t first, std::span<float> out)>;

constexpr int64_t kChunk = 1 << 15;

// The chunk of `tensor`, on the host, that begins at `first`.
Status write_chunk(const Tensor& tensor, int64_t first, const Values& values) {
  const int64_t count = std::min(kChunk, tensor.numel() - first);
  std::vector<float> floats(static_cast<size_t>(count));
  values(first, floats);
  TE_FL_ASSIGN_OR_RETURN(const Tensor made, Tensor::from_values({count}, floats, tensor.dtype()));
  std::memcpy(tensor.data<char>() + bytes_for(tensor.dtype(), first), made.raw_data(),
              static_cast<size_t>(bytes_for(tensor.dtype(), count)));
  return {};
}

// All chunks, on all cores.
Status write(const Tensor& tensor, const Values& values) {
  const int64_t chunks = (tensor.numel() + kChunk - 1) / kChunk;
  const int64_t cores = std::max<int64_t>(std::thread::hardware_concurrency(), 1);
  const int64_t workers = std::min(chunks, cores);
  std::vector<Status> results(static_cast<size_t>(workers));
  std::atomic<int64_t> next{0};
  const auto work = [&](size_t worker) {
    for (int64_t c = next++; c < chunks && results[worker].ok(); c = next++) {
      results[worker] = write_chunk(tensor, c * kChunk, values);
    }
  };
  std::vector<std::thread> threads;
  for (size_t w = 1; w < results.size(); ++w) {
    try {
      threads.emplace_back(work, w);
    } catch (const std::system_error&) {
      break;  // no more threads: those that there are do all of it
    }
  }
  work(0);
  for (std::thread& thread : threads) thread.join();
  for (Status& status : results) TE_FL_RETURN_IF_ERROR(std::move(status));
  return {};
}

thread_local int t_without_values = 0;

Result<std::shared_ptr<Parameter>> make(std::span<const int64_t> shape, DType dtype, Device device,
                                        const Values& values) {
  if (!is_high(dtype)) {
    return invalid_argument("a parameter's dtype is " + std::string(name(dtype)) +
                            "; it must be f32, bf16 or f16");
  }
  TE_FL_RETURN_IF_ERROR(count_of(shape).status());
  auto parameter = std::make_shared<Parameter>();
  if (t_without_values > 0) {
    parameter->value = Tensor::Access::make({nullptr, shape, {}, dtype, device, nullptr});
    return parameter;
  }
  TE_FL_ASSIGN_OR_RETURN(parameter->value, Tensor::empty(shape, dtype));
  TE_FL_RETURN_IF_ERROR(write(parameter->value, values));
  if (!device.is_host()) {
    TE_FL_ASSIGN_OR_RETURN(parameter->value, parameter->value.to(device));
  }
  return parameter;
}

Status check_shard(std::span<const int64_t> shape, const Shard& shard) {
  bool fits = shard.whole.size() == shape.size() && shard.begin.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = shard.begin[i] >= 0 && shard.begin[i] <= shard.whole[i] - shape[i];
  }
  if (fits) return {};
  return invalid_argument(
      "a parameter's shard does not lie within the whole: whole and begin must have an extent for "
      "each of the shard's, and begin + extent must be at most the whole's");
}

// The index in the whole of the shard's element `index`.
int64_t index_in_whole(std::span<const int64_t> shape, const Shard& shard, int64_t index) {
  int64_t result = 0, stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    result += (shard.begin[d] + index % shape[d]) * stride;
    index /= shape[d];
    stride *= shard.whole[d];
  }
  return result;
}

}  // namespace

WithoutValues::WithoutValues() { ++t_without_values; }
WithoutValues::~WithoutValues() { --t_without_values; }

uint64_t subseed(uint64_t seed, uint64_t index) {
  return number(seed ^ (index + 1) * 0xd1342543de82ef95ull, 0);
}

Result<std::shared_ptr<Parameter>> normal(std::span<const int64_t> shape, float std, uint64_t seed,
                                          DType dtype, Device device, const Shard& shard) {
  if (!(std >= 0) || !std::isfinite(std)) {
    return invalid_argument("a parameter's initial standard deviation is " + std::to_string(std) +
                            "; it must be finite and at least 0");
  }
  if (shard.whole.empty()) {
    return make(shape, dtype, device, [&](int64_t first, std::span<float> out) {
      normal_numbers(seed, std, static_cast<uint64_t>(first), out);
    });
  }
  TE_FL_RETURN_IF_ERROR(count_of(shard.whole).status());
  TE_FL_RETURN_IF_ERROR(check_shard(shape, shard));
  return make(shape, dtype, device, [&](int64_t first, std::span<float> out) {
    const int64_t row = shape.empty() ? 1 : shape.back();
    while (!out.empty()) {  // row by row
      const auto count = static_cast<size_t>(
          std::min<int64_t>(row - first % row, static_cast<int64_t>(out.size())));
      normal_numbers(seed, std, static_cast<uint64_t>(index_in_whole(shape, shard, first)),
                     out.first(count));
      out = out.subspan(count);
      first += static_cast<int64_t>(count);
    }
  });
}

Result<std::shared_ptr<Parameter>> constant(std::span<const int64_t> shape, float value,
                                            DType dtype, Device device) {
  return make(shape, dtype, device,
              [&](int64_t, std::span<float> out) { std::ranges::fill(out, value); });
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
