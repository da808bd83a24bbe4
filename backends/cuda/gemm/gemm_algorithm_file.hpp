// The file of measured choices of GEMM algorithms. Plain C++, so that it can be tested where there
// is no GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <istream>
#include <string>
#include <vector>

namespace te_fl::cuda {

struct GemmChoice {
  std::string device, problem;          // the GPU's name; all else that the choice depends on
  size_t library = 0;                   // cublasLtGetVersion()
  int power_limit = 0;                  // W that the GPU may draw; 0: nobody knew
  std::array<uint64_t, 8> algorithm{};  // a cublasLtMatmulAlgo_t
  std::string config;                   // for a reader
  double us = 0, first_us = 0;          // of the choice, and of the heuristic's first
  int candidates = 0, different = 0;    // timed; dropped because their results differed

  bool operator==(const GemmChoice&) const = default;
};

// Throws std::exception with what is wrong if `in` does not hold choices of format 1. Members that
// older versions did not write are left as they are above.
std::vector<GemmChoice> parse_gemm_choices(std::istream& in);

std::string gemm_choices_text(const std::vector<GemmChoice>& choices);

// The choice for a problem on a device with that power limit: one measured under the same limit
// before one whose limit nobody knew, as in files of older versions. Where `power_limit` is not
// known, 0, any serves. NULL: there is none.
const GemmChoice* find_choice(const std::vector<GemmChoice>& choices, const std::string& device,
                              size_t library, int power_limit, const std::string& problem);

// `choices` and those of `more` whose device, library, power limit and problem it lacks.
std::vector<GemmChoice> merge_choices(std::vector<GemmChoice> choices,
                                      const std::vector<GemmChoice>& more);

// Reads a file. Throws std::exception if it cannot be read or is no file of choices; one that is
// not there holds none if `may_lack`, and else is an error.
std::vector<GemmChoice> read_choices(const std::string& path, bool may_lack);

// Adds what the file lacks and returns all that it then holds; what it has stays, whoever measured
// it. Any number of threads and processes may do so at once: each reads and replaces the file under
// a lock (on PATH.lock, which stays), by a rename after its bytes are on the disk. Throws
// std::exception, with the file as it was, if it cannot be written or holds something else.
std::vector<GemmChoice> add_choices(const std::string& path, const std::vector<GemmChoice>& more);

}  // namespace te_fl::cuda
