#include "bench/cases/case.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <random>

#include "te_fl/numeric.hpp"

namespace te_fl::bench {
namespace {

te_fl_dtype dl_dtype(int dtype) {
  switch (dtype) {
    case TE_FL_F32:
      return {TE_FL_CODE_FLOAT, 32, 1};
    case TE_FL_F16:
      return {TE_FL_CODE_FLOAT, 16, 1};
    case TE_FL_BF16:
      return {TE_FL_CODE_BFLOAT, 16, 1};
    case TE_FL_F8E4M3:
      return {TE_FL_CODE_FLOAT8_E4M3FN, 8, 1};
    case TE_FL_F8E5M2:
      return {TE_FL_CODE_FLOAT8_E5M2, 8, 1};
    case TE_FL_I32:
      return {TE_FL_CODE_INT, 32, 1};
    case TE_FL_I64:
      return {TE_FL_CODE_INT, 64, 1};
    default:
      return {TE_FL_CODE_UINT, 8, 1};
  }
}

// Fills memory with a repeated pattern of normally distributed numbers, or of small non-negative
// integers for integer dtypes.
void fill(void* to, int64_t bytes, int dtype) {
  constexpr size_t kPattern = 1 << 14;
  std::mt19937 engine(17);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> pattern;
  const auto append = [&](auto value) {
    const auto* raw = reinterpret_cast<const uint8_t*>(&value);
    pattern.insert(pattern.end(), raw, raw + sizeof value);
  };
  for (size_t i = 0; i < kPattern; ++i) {
    const float x = normal(engine);
    switch (dtype) {
      case TE_FL_F32:
        append(x);
        break;
      case TE_FL_F16:
        append(numeric::float_to_fp16(x));
        break;
      case TE_FL_BF16:
        append(numeric::float_to_bf16(x));
        break;
      case TE_FL_F8E4M3:
        append(numeric::float_to_e4m3(x));
        break;
      case TE_FL_F8E5M2:
        append(numeric::float_to_e5m2(x));
        break;
      case TE_FL_I32:
        append(int32_t{0});
        break;
      case TE_FL_I64:
        append(static_cast<int64_t>(engine() % 256));
        break;
      default:
        append(static_cast<uint8_t>(engine() % 2));
    }
  }
  auto* out = static_cast<uint8_t*>(to);
  for (int64_t at = 0; at < bytes;) {
    const int64_t n = std::min(bytes - at, static_cast<int64_t>(pattern.size()));
    std::memcpy(out + at, pattern.data(), static_cast<size_t>(n));
    at += n;
  }
}

}  // namespace

BenchTensor::Memory BenchTensor::allocate(int64_t bytes) {
  const size_t rounded = (static_cast<size_t>(bytes) + 4095) / 4096 * 4096;
  Memory memory(std::aligned_alloc(4096, std::max<size_t>(rounded, 4096)));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory.get(), 0, rounded);
  return memory;
}

BenchTensor::BenchTensor(Shape shape, int dtype) : shape_(std::move(shape)) {
  tensor_.dl.device = {TE_FL_DEVICE_CPU, 0};
  tensor_.dl.ndim = static_cast<int32_t>(shape_.size());
  tensor_.dl.dtype = dl_dtype(dtype);
  tensor_.dl.shape = shape_.data();
  memory_ = allocate(bytes());
  tensor_.dl.data = memory_.get();
  fill(memory_.get(), bytes(), dtype);
}

int64_t BenchTensor::numel() const {
  int64_t n = 1;
  for (int64_t extent : shape_) n *= extent;
  return n;
}
int64_t BenchTensor::bytes() const { return numel() * tensor_.dl.dtype.bits / 8; }

void BenchTensor::quantised(te_fl_scaling scaling, uint32_t flags, bool columnwise) {
  quant_.scaling = scaling;
  quant_.flags = flags;
  quant_.amax = &amax_;
  quant_.scale = &scale_;
  // Allocates enough for the scales of any scaling mode: a scale for each 1x32 block, with extents
  // padded to multiples of 128.
  const int64_t cols = shape_.back(), rows = numel() / std::max<int64_t>(1, cols);
  scale_bytes_ = ((rows + 128) * (cols + 128) / 32 + 1024) * 4;
  scales_ = allocate(scale_bytes_);
  std::fill_n(static_cast<float*>(scales_.get()), scale_bytes_ / 4, 1.0f);
  quant_.scale_inv = scales_.get();
  if (columnwise) {
    columns_ = allocate(bytes());
    fill(columns_.get(), bytes(), TE_FL_F8E4M3);
    quant_.columnwise_data = columns_.get();
    if (scaling != TE_FL_SCALING_TENSOR) {
      column_scales_ = allocate(scale_bytes_);
      quant_.columnwise_scale_inv = column_scales_.get();
    }
  }
  tensor_.quant = &quant_;
}

std::vector<BenchTensor::Part> BenchTensor::parts() {
  std::vector<Part> list{{&tensor_.dl.data, bytes()}};
  if (tensor_.quant == nullptr) return list;
  const auto add = [&](auto*& pointer, int64_t size) {
    if (pointer != nullptr) list.push_back({reinterpret_cast<void**>(&pointer), size});
  };
  add(quant_.columnwise_data, bytes());
  add(quant_.scale_inv, scale_bytes_);
  add(quant_.columnwise_scale_inv, scale_bytes_);
  add(quant_.amax, sizeof(float));
  add(quant_.scale, sizeof(float));
  return list;
}

void BenchTensor::drop_memory() {
  for (Memory* m : {&memory_, &columns_, &scales_, &column_scales_}) m->reset();
}

BenchTensor& Case::make(Shape shape, int dtype, int times) {
  BenchTensor& t = tensors_.emplace_back(std::move(shape), dtype);
  bytes += times * t.bytes();
  memory += t.bytes();
  return t;
}

BenchTensor& Case::fp8(Shape shape, int dtype, te_fl_scaling scaling, bool columnwise,
                       uint32_t flags) {
  BenchTensor& t = make(std::move(shape), dtype, columnwise ? 2 : 1);
  if (columnwise) memory += t.bytes();
  t.quantised(scaling, flags, columnwise);
  return t;
}

}  // namespace te_fl::bench
