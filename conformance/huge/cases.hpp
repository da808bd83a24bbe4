#pragma once

#include <functional>
#include <string>
#include <vector>

#include "conformance/huge/sampled.hpp"

// Ops on tensors of more than 2^31 elements: every op of the catalogue, and of each the ways in
// which the backends walk their tensors, as far as those are known from outside: aligned and odd
// extents, every layout, every scaling mode, rows that fit a kernel's registers and rows that do
// not. Each family's are listed in conformance/cases, and made by the header of its name here.
namespace te_fl::huge {

struct Case {
  std::string op;
  std::string what;  // the way
  std::function<void(Run&)> run;
};
using Cases = std::vector<Case>;

// Extents that are multiples of all that kernels like, and of nothing.
inline constexpr int64_t kCols = 4096, kOddCols = 4099;

void add_activations(Cases& cases);
void add_attention(Cases& cases);
void add_chunks(Cases& cases);
void add_permute_by_mask(Cases& cases);
void add_gemm(Cases& cases);
void add_grouped_gemm(Cases& cases);
void add_moe(Cases& cases);
void add_multi_tensor(Cases& cases);
void add_norms(Cases& cases);
void add_norm_gradients(Cases& cases);
void add_optimizers(Cases& cases);
void add_quantize(Cases& cases);
void add_dequantize(Cases& cases);
void add_rope(Cases& cases);
void add_router(Cases& cases);
void add_scaled_activations(Cases& cases);
void add_softmax(Cases& cases);
void add_tensor(Cases& cases);

Cases all_cases();

}  // namespace te_fl::huge
