// The file of measured choices of GEMM algorithms. Plain C++, so that it can be tested where there
// is no GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace te_fl::cuda {

struct GemmChoice {
  std::string device, problem;          // the GPU's name; all that the choice depends on
  size_t library = 0;                   // cublasLtGetVersion()
  std::array<uint64_t, 8> algorithm{};  // a cublasLtMatmulAlgo_t
  std::string config;                   // the same for a reader
  double us = 0, first_us = 0;          // of the choice, and of the heuristic's first
  int candidates = 0, different = 0;    // timed; dropped because their results differed

  bool operator==(const GemmChoice&) const = default;
};

// Throws std::exception with what is wrong if `in` does not hold choices of format 1. Members that
// older versions did not write are left as they are above.
std::vector<GemmChoice> parse_gemm_choices(std::istream& in);

std::string gemm_choices_text(const std::vector<GemmChoice>& choices);

}  // namespace te_fl::cuda
