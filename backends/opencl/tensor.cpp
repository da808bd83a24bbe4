// The ops add, strided_copy and fill.
#include "te_fl/ops/tensor.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "families.hpp"
#include "overlap.hpp"
#include "random.hpp"
#include "te_fl/numeric/formats.hpp"

namespace te_fl::opencl {
namespace {

// ---- add

void add(const DeviceCall& call, const te_fl_add_args& args) {
  const int64_t n = backend::numel(*args.output);
  Launch launch(call.device, call.stream(), "tensor",
                define("TA", args.a) + define("TB", args.b) + define("TY", args.output), "add");
  launch.data(args.a).data(args.b).data(args.output).data(args.mask).value(n).value(kept(args.p));
  random(launch, *call.context.rng, args.p)
      .value<int32_t>(args.mask != nullptr ? 1 : 0)
      .items((n + 7) / 8);
}

Refusal refuse_add(const te_fl_add_args& args) {
  if (!all_dense(args.a, args.b, args.output, args.mask)) return kNotContiguous;
  const bool askew = overlaps_askew(*args.output, args.a) || overlaps_askew(*args.output, args.b);
  return askew ? kOverlaps : nullptr;
}

// ---- strided_copy, fill

constexpr int kMaxRank = 8;

struct Strides {  // same layout as in tensor.cl
  int64_t extent[kMaxRank], from[kMaxRank], to[kMaxRank];
};

Strides strides_of(const te_fl_tensor& from, const te_fl_tensor& to) {
  Strides s{};
  for (int d = 0; d < to.dl.ndim; ++d) {
    s.extent[d] = to.dl.shape[d];
    s.from[d] = backend::stride(from, d);
    s.to[d] = backend::stride(to, d);
  }
  return s;
}

std::string as_bits(const te_fl_tensor& t) {
  return define("BITS", t.dl.dtype.bits) + define("TA", TE_FL_F32) + define("TB", TE_FL_F32) +
         define("TY", TE_FL_F32);
}

bool same_dtype(const te_fl_tensor& a, const te_fl_tensor& b) {
  return dtype_index(a.dl.dtype) == dtype_index(b.dl.dtype);
}

void strided_copy(const DeviceCall& call, const te_fl_strided_copy_args& args) {
  const bool same = same_dtype(*args.input, *args.output);
  const int64_t n = backend::numel(*args.output);
  const std::string options =
      same ? as_bits(*args.input)
           : define("TA", args.input) + define("TB", TE_FL_F32) + define("TY", args.output);
  Launch(call.device, call.stream(), "tensor", options, same ? "move" : "convert")
      .data(args.input)
      .data(args.output)
      .value(n)
      .value<int32_t>(args.output->dl.ndim)
      .value(strides_of(*args.input, *args.output))
      .items(n);
}

Refusal refuse_copy(const te_fl_strided_copy_args& args) {
  const int from = dtype_index(args.input->dl.dtype), to = dtype_index(args.output->dl.dtype);
  if (from == TE_FL_F4E2M1 || to == TE_FL_F4E2M1) return "copies whole bytes";
  if (args.output->dl.ndim > kMaxRank) return "copies tensors of up to 8 dimensions";
  constexpr uint32_t kConverted = TE_FL_MASK_HIGH | TE_FL_MASK_FP8;
  const bool converts = (TE_FL_BIT(from) & kConverted) != 0 && (TE_FL_BIT(to) & kConverted) != 0;
  return from == to || converts ? nullptr : "converts between F32, F16, BF16 and FP8 only";
}

// Returns the bits of an element of integer type T with this value, rounded towards zero. The op's
// rules keep the value in T's range.
template <class T>
uint64_t integer(double value) {
  return static_cast<uint64_t>(static_cast<T>(value));
}
template <class T>
uint64_t bits_of(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);  // little-endian, like the device
  return bits;
}

uint64_t element(int dtype, double value) {
  switch (dtype) {
    case TE_FL_I8:
      return integer<int8_t>(value);
    case TE_FL_I16:
      return integer<int16_t>(value);
    case TE_FL_I32:
      return integer<int32_t>(value);
    case TE_FL_I64:
      return integer<int64_t>(value);
    case TE_FL_U8:
    case TE_FL_BOOL:
      return integer<uint8_t>(value);
    case TE_FL_U16:
      return integer<uint16_t>(value);
    case TE_FL_U32:
      return integer<uint32_t>(value);
    case TE_FL_U64:
      return integer<uint64_t>(value);
    case TE_FL_F64:
      return bits_of(value);
    case TE_FL_F16:
      return numeric::double_to_fp16(value);
    case TE_FL_BF16:
      return numeric::double_to_bf16(value);
    case TE_FL_F8E4M3:
      return numeric::double_to_e4m3(value);
    case TE_FL_F8E5M2:
      return numeric::double_to_e5m2(value);
    case TE_FL_F8E8M0:
      return numeric::double_to_e8m0(value);
    default:
      return bits_of(static_cast<float>(value));
  }
}

void fill(const DeviceCall& call, const te_fl_fill_args& args) {
  const int64_t n = backend::numel(*args.output);
  const uint64_t value = element(dtype_index(args.output->dl.dtype), args.value);
  Launch(call.device, call.stream(), "tensor", as_bits(*args.output), "fill")
      .data(args.output)
      .value(n)
      .value<int32_t>(args.output->dl.ndim)
      .value(strides_of(*args.output, *args.output))
      .value(value)
      .items(n);
}

Refusal refuse_fill(const te_fl_fill_args& args) {
  if (dtype_index(args.output->dl.dtype) == TE_FL_F4E2M1) return "fills whole bytes";
  return args.output->dl.ndim > kMaxRank ? "fills tensors of up to 8 dimensions" : nullptr;
}

}  // namespace

void append_tensor(Ops& ops) {
  ops.push_back(descriptor<te_fl_add_args, add, refuse_add>("add"));
  ops.push_back(descriptor<te_fl_strided_copy_args, strided_copy, refuse_copy>("strided_copy"));
  ops.push_back(descriptor<te_fl_fill_args, fill, refuse_fill>("fill"));
}

}  // namespace te_fl::opencl
