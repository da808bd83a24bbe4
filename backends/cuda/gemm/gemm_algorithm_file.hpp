// The file of measured GEMM algorithm choices. Plain C++, so tests run without a GPU.
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
  std::string device, problem;          // the GPU's name; everything else on which the choice
                                        // depends
  size_t library = 0;                   // result of cublasLtGetVersion()
  int power_limit = 0;                  // power limit of the GPU in W; 0: unknown
  std::array<uint64_t, 8> algorithm{};  // the bytes of a cublasLtMatmulAlgo_t
  std::string config;                   // text for human readers
  double us = 0, first_us = 0;        // time of the chosen algorithm, and of the heuristic's first
  int candidates = 0, different = 0;  // number timed; number dropped because of differing results

  bool operator==(const GemmChoice&) const = default;
};

// Parses choices of format 1. Throws std::exception if `in` is not valid. Members that older
// versions did not write keep the defaults above.
std::vector<GemmChoice> parse_gemm_choices(std::istream& in);

std::string gemm_choices_text(const std::vector<GemmChoice>& choices);

// Returns the choice for a problem on a device with this power limit; NULL if there is none.
// Prefers a choice that was measured under the same limit to one with an unknown limit, which files
// of older te-fl versions contain. If `power_limit` is 0 (unknown), choices with any limit match.
const GemmChoice* find_choice(const std::vector<GemmChoice>& choices, const std::string& device,
                              size_t library, int power_limit, const std::string& problem);

// Returns `choices` plus the elements of `more` whose combination of device, library, power limit
// and problem is not in `choices`.
std::vector<GemmChoice> merge_choices(std::vector<GemmChoice> choices,
                                      const std::vector<GemmChoice>& more);

// Reads a file. Throws std::exception if it cannot be read or is not a file of choices. A missing
// file gives no choices if `may_lack`, else it is an error.
std::vector<GemmChoice> read_choices(const std::string& path, bool may_lack);

// Adds the choices that the file lacks, and returns all choices that it then has; existing ones are
// kept. Threads and processes may call this concurrently: each reads and replaces the file under a
// lock on PATH.lock (which is never removed), by a rename after fsync. Throws std::exception and
// leaves the file unchanged if it cannot be written or has other contents.
std::vector<GemmChoice> add_choices(const std::string& path, const std::vector<GemmChoice>& more);

}  // namespace te_fl::cuda
