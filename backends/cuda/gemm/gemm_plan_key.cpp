#include "gemm/gemm_plan_key.hpp"

#include <bit>
#include <functional>
#include <string_view>
#include <type_traits>

#include "te_fl/dtype.hpp"

namespace te_fl::cuda {
namespace {

using Args = te_fl_generic_gemm_args;

// Returns the base-2 logarithm of the alignment of an address, at most that of 256. make_plan()
// does not distinguish larger alignments.
uint32_t alignment(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p) | 256u;
  return static_cast<uint32_t>(std::countr_zero(address));
}
uint32_t alignment_of(const Problem& p, const Operand& o) {
  return alignment(p.fp8 ? o.codes : backend::data<const void>(*o.tensor));
}

uint32_t byte_of_dtype(const te_fl_tensor* t) {
  return t == nullptr ? 0xffu : static_cast<uint32_t>(dtype_index(t->dl.dtype)) & 0xffu;
}

}  // namespace

PlanKey::PlanKey(int on, const Args& args, const Problem& p) : m(p.m), n(p.n), k(p.k), device(on) {
  alignments = alignment_of(p, p.a) | alignment_of(p, p.b) << 8 |
               alignment(backend::data<const void>(*args.d)) << 16;
  const te_fl_tensor* added = args.bias != nullptr ? args.bias : args.bias_grad;
  dtypes = byte_of_dtype(args.a) | byte_of_dtype(args.b) << 8 | byte_of_dtype(args.d) << 16 |
           byte_of_dtype(added) << 24;
  const bool bits[] = {args.trans_a != 0,
                       args.trans_b != 0,
                       args.accumulate != 0,
                       args.accumulate_bias_grad != 0,
                       args.use_split_accumulator != 0,
                       args.bias != nullptr,
                       args.bias_grad != nullptr,
                       p.fp8,
                       p.block,
                       p.direct,
                       p.bias_grad};
  for (const bool bit : bits) flags = flags << 1 | (bit ? 1u : 0u);
  flags = flags << 2 | static_cast<uint32_t>(p.convert);
  flags = flags << 4 | backend::scaling(*args.a);
  flags = flags << 4 | backend::scaling(*args.b);
}

size_t PlanKey::Hash::operator()(const PlanKey& key) const noexcept {
  static_assert(std::has_unique_object_representations_v<PlanKey>);
  return std::hash<std::string_view>()({reinterpret_cast<const char*>(&key), sizeof key});
}

}  // namespace te_fl::cuda
