#include "te_fl/nn/modules/init.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <new>
#include <numbers>
#include <string>
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

// A uniform number in (0, 1].
double uniform(uint64_t seed, uint64_t index) {
  return (static_cast<double>(number(seed, index) >> 11) + 1) * 0x1p-53;
}

// Writes the elements [first, first + out.size()) of a sequence of normal numbers, which are
// computed in pairs.
void normal_numbers(uint64_t seed, double std, uint64_t first, std::span<float> out) {
  for (size_t i = 0; i < out.size();) {
    const uint64_t at = first + i, pair = at & ~uint64_t{1};
    const double radius = std * std::sqrt(-2 * std::log(uniform(seed, pair)));
    const double angle = 2 * std::numbers::pi * uniform(seed, pair + 1);
    if (at == pair) out[i++] = static_cast<float>(radius * std::cos(angle));
    if (i < out.size()) out[i++] = static_cast<float>(radius * std::sin(angle));
  }
}

Result<int64_t> count_elements(std::span<const int64_t> shape) {
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

// A function that writes the elements [first, first + out.size()).
using Values = std::function<void(int64_t first, std::span<float> out)>;

constexpr int64_t kChunk = 1 << 15;

// Writes the chunk of a host tensor that begins at `first`. Does not throw, since it runs on worker
// threads.
Status write_chunk(const Tensor& tensor, int64_t first, const Values& values) noexcept try {
  const int64_t count = std::min(kChunk, tensor.numel() - first);
  std::vector<float> floats(static_cast<size_t>(count));
  values(first, floats);
  TE_FL_ASSIGN_OR_RETURN(const Tensor made, Tensor::from_values({count}, floats, tensor.dtype()));
  std::memcpy(tensor.data<char>() + bytes_for(tensor.dtype(), first), made.raw_data(),
              static_cast<size_t>(bytes_for(tensor.dtype(), count)));
  return {};
} catch (const std::bad_alloc&) {
  return Status(StatusCode::kOutOfMemory, "no host memory to draw a parameter's values in");
}

// Writes all chunks, on all cores.
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
  threads.reserve(results.size());
  for (size_t w = 1; w < results.size(); ++w) {
    try {
      threads.emplace_back(work, w);
    } catch (const std::exception&) {
      break;  // no more threads; the existing ones do the work
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
  TE_FL_RETURN_IF_ERROR(count_elements(shape).status());
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
  const bool ranges = !shard.rows.empty();
  for (size_t i = ranges ? 1 : 0; fits && i < shape.size(); ++i) {
    fits = shard.begin[i] >= 0 && shard.begin[i] <= shard.whole[i] - shape[i];
  }
  if (ranges) {
    int64_t left = fits && !shape.empty() ? shape[0] : -1;
    for (const Shard::Rows& r : shard.rows) {
      fits = fits && r.begin >= 0 && r.count >= 1 && r.begin <= shard.whole[0] - r.count &&
             r.count <= left;
      if (fits) left -= r.count;
    }
    fits = fits && left == 0;
  }
  if (fits) return {};
  return invalid_argument(
      "a parameter's shard does not lie within the whole: whole and begin must have an extent for "
      "each of the shard's, and begin + extent must be at most the whole's; "
      "rows, if given, must have the shard's rows in all");
}

// The index in the complete tensor of the shard's element `index`.
int64_t index_in_whole(std::span<const int64_t> shape, const Shard& shard, int64_t index) {
  int64_t result = 0, stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    int64_t begin = shard.begin[d], at = index % shape[d];
    if (d == 0 && !shard.rows.empty()) {
      size_t range = 0;
      while (at >= shard.rows[range].count) at -= shard.rows[range++].count;
      begin = shard.rows[range].begin;
    }
    result += (begin + at) * stride;
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
  TE_FL_RETURN_IF_ERROR(count_elements(shard.whole).status());
  TE_FL_RETURN_IF_ERROR(check_shard(shape, shard));
  const Values values = [&](int64_t first, std::span<float> out) {
    const int64_t row = shape.empty() ? 1 : shape.back();
    while (!out.empty()) {  // row by row
      const auto count = static_cast<size_t>(
          std::min<int64_t>(row - first % row, static_cast<int64_t>(out.size())));
      normal_numbers(seed, std, static_cast<uint64_t>(index_in_whole(shape, shard, first)),
                     out.first(count));
      out = out.subspan(count);
      first += static_cast<int64_t>(count);
    }
  };
  TE_FL_ASSIGN_OR_RETURN(auto parameter, make(shape, dtype, device, values));
  parameter->shard = shard;
  return parameter;
}

Result<std::shared_ptr<Parameter>> constant(std::span<const int64_t> shape, float value,
                                            DType dtype, Device device) {
  return make(shape, dtype, device,
              [&](int64_t, std::span<float> out) { std::ranges::fill(out, value); });
}

namespace {

Status check_rotary(const RotaryOptions& o) {
  if (o.dim < 2 || o.dim % 2 != 0) {
    return invalid_argument("rotary_angles: dim is " + std::to_string(o.dim) +
                            "; it must be even and at least 2");
  }
  if (o.max_seqlen < 1 || !(o.base > 0)) {
    return invalid_argument("rotary_angles: max_seqlen is " + std::to_string(o.max_seqlen) +
                            " and base " + std::to_string(o.base) +
                            "; they must be at least 1 and greater than 0");
  }
  if (o.first_position < 0) {
    return invalid_argument("rotary_angles: first_position is " + std::to_string(o.first_position) +
                            "; it must be at least 0");
  }
  if (o.scaling == RotaryScaling::kNone) {
    if (o.factor == 1) return {};
    return invalid_argument("rotary_angles: factor is " + std::to_string(o.factor) +
                            " and scaling kNone, which has none; set scaling, or leave factor 1");
  }
  if (!(o.factor >= 1) || !std::isfinite(o.factor)) {
    return invalid_argument("rotary_angles: factor is " + std::to_string(o.factor) +
                            "; it must be finite and at least 1 (new length / trained length)");
  }
  if (o.scaling == RotaryScaling::kNtk && o.dim < 4) {
    return invalid_argument(
        "rotary_angles: dim is 2 with scaling kNtk, which leaves the first of several pairs alone; "
        "dim must be at least 4");
  }
  const bool yarn = o.scaling == RotaryScaling::kYarn;
  if (!yarn && o.scaling != RotaryScaling::kLlama3) return {};
  const double fast = yarn ? o.beta_fast : o.high_freq_factor;
  const double slow = yarn ? o.beta_slow : o.low_freq_factor;
  if (o.original_max_positions >= 1 && slow > 0 && fast > slow && o.base > 1) return {};
  return invalid_argument(
      "rotary_angles: original_max_positions is " + std::to_string(o.original_max_positions) +
      ", base " + std::to_string(o.base) + ", " + (yarn ? "beta_fast " : "high_freq_factor ") +
      std::to_string(fast) + " and " + (yarn ? "beta_slow " : "low_freq_factor ") +
      std::to_string(slow) +
      "; the first must be at least 1, base greater than 1, and the third greater than the last, "
      "which must be greater than 0");
}

// The fraction of its original frequency that a pair keeps under YaRN, 1 - gamma in the paper. The
// ramp is over pair indices, and its ends are rounded outwards as in the authors' code.
double yarn_share(const RotaryOptions& o, int64_t pair) {
  const auto dim = static_cast<double>(o.dim);
  // The index of the pair that makes `turns` rotations: solves positions * base^(-2i/dim) = 2 pi
  // turns for i.
  const auto pair_of = [&](double turns) {
    const double ratio =
        static_cast<double>(o.original_max_positions) / (2 * std::numbers::pi * turns);
    return dim * std::log(ratio) / (2 * std::log(o.base));
  };
  const double begin = std::max(std::floor(pair_of(o.beta_fast)), 0.0);
  const double end = std::max(std::min(std::ceil(pair_of(o.beta_slow)), dim - 1), begin);
  const double width = end > begin ? end - begin : 0.001;
  return 1 - std::clamp((static_cast<double>(pair) - begin) / width, 0.0, 1.0);
}

// The frequency of a pair, in radians per position.
double frequency(const RotaryOptions& o, int64_t pair) {
  const double dim = static_cast<double>(o.dim);
  const double exponent = -2.0 * static_cast<double>(pair) / dim;
  const double own = std::pow(o.base, exponent);
  switch (o.scaling) {
    case RotaryScaling::kNone:
      return own;
    case RotaryScaling::kLinear:
      return own / o.factor;
    case RotaryScaling::kNtk:
      return std::pow(o.base * std::pow(o.factor, dim / (dim - 2)), exponent);
    case RotaryScaling::kYarn: {
      const double share = yarn_share(o, pair);
      return own * share + own / o.factor * (1 - share);
    }
    case RotaryScaling::kLlama3: {
      const double turns =
          static_cast<double>(o.original_max_positions) * own / (2 * std::numbers::pi);
      const double share = std::clamp(
          (turns - o.low_freq_factor) / (o.high_freq_factor - o.low_freq_factor), 0.0, 1.0);
      return own * share + own / o.factor * (1 - share);
    }
  }
  return own;
}

}  // namespace

double yarn_softmax_scale(double factor) noexcept {
  const double temperature = 0.1 * std::log(std::max(factor, 1.0)) + 1;
  return temperature * temperature;
}

Result<Tensor> rotary_angles(const RotaryOptions& options) {
  TE_FL_RETURN_IF_ERROR(check_rotary(options));
  const int64_t half = options.dim / 2;
  TE_FL_ASSIGN_OR_RETURN(Tensor host,
                         Tensor::empty({options.max_seqlen, 1, 1, options.dim}, DType::kF32));
  std::vector<double> frequencies(static_cast<size_t>(half));
  for (int64_t pair = 0; pair < half; ++pair) {
    frequencies[static_cast<size_t>(pair)] = frequency(options, pair);
  }
  for (int64_t s = 0; s < options.max_seqlen; ++s) {
    const double position = static_cast<double>(options.first_position + s);
    float* row = host.data<float>() + s * options.dim;
    for (int64_t pair = 0; pair < half; ++pair) {
      const auto angle = static_cast<float>(position * frequencies[static_cast<size_t>(pair)]);
      row[options.interleaved ? 2 * pair : pair] = angle;
      row[options.interleaved ? 2 * pair + 1 : pair + half] = angle;
    }
  }
  if (options.device.is_host()) return host;
  return host.to(options.device);
}

}  // namespace te_fl::nn::init
