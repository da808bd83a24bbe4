#include "conformance/huge/cases.hpp"

namespace te_fl::huge {

Cases all_cases() {
  Cases cases;
  add_activations(cases);
  add_attention(cases);
  add_gemm(cases);
  add_grouped_gemm(cases);
  add_moe(cases);
  add_norms(cases);
  add_norm_gradients(cases);
  add_optimizers(cases);
  add_multi_tensor(cases);
  add_quantize(cases);
  add_dequantize(cases);
  add_rope(cases);
  add_router(cases);
  add_chunks(cases);
  add_permute_by_mask(cases);
  add_scaled_activations(cases);
  add_softmax(cases);
  add_tensor(cases);
  return cases;
}

}  // namespace te_fl::huge
