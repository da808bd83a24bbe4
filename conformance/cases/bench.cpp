// The benchmark cases of all families.
#include "bench/cases/case.hpp"

namespace te_fl::bench {

const Cases& all_cases() {
  static const Cases table = [] {
    Cases cases;
    for (const auto family :
         {add_gemm, add_grouped_gemm, add_attention, add_activation, add_norm, add_quantize,
          add_delayed_scaling, add_moe, add_optimizer, add_multi_tensor, add_softmax, add_rope,
          add_router, add_chunks, add_permute_by_mask, add_scaled_activation, add_dropout,
          add_tensor}) {
      family(cases);
    }
    return cases;
  }();
  return table;
}

}  // namespace te_fl::bench
