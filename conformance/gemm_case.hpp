// A case of generic_gemm or grouped_gemm: its arguments and the expected results.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "conformance/case.hpp"

namespace te_fl::conformance {

struct GemmCase {
  Spec a = TE_FL_F32, b = TE_FL_F32, d = TE_FL_F32;
  int64_t m = 13, n = 21, k = 17;
  bool trans_a = false, trans_b = true;
  double alpha = 1, beta = 1;
  bool accumulate = false, split = false, gelu = false;
  int bias = -1;                        // dtype; -1: none
  std::vector<Spec> pre_gelu_out = {};  // none or one
  std::vector<Spec> pre_gelu_in = {};
  int residual = -1;
  bool in_place = false;  // the result overwrites the residual
  int bias_grad = -1;
  bool accumulate_bias_grad = false, large = false;
  std::string refusal = {};  // the implementation may refuse with this text
  bool error = false;        // the implementation must refuse
  int d_sum = -1;
};

std::string name_of_case(const GemmCase& v);
// Makes the tensors of the case, and the oracle that computes their expected contents in double
// precision.
void set_up(Problem& p, const GemmCase& v);

void add_fp8_gemm_cases(std::vector<GemmCase>& all);

// A case of grouped_gemm: the GEMM `product`, once with each of these sizes.
struct GroupCase {
  GemmCase product;
  std::vector<std::array<int64_t, 3>> sizes;  // M, N, K
  std::string what = {};                      // description of the sizes for the case's name
};
std::string name_of_case(const GroupCase& v);
void set_up(Problem& p, const GroupCase& v);

}  // namespace te_fl::conformance
