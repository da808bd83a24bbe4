// Chooses the cuBLASLt algorithm of a product: from a file, from a measurement, or the heuristic's
// first.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gemm/gemm_algorithm_file.hpp"
#include "te_fl/plugin.h"

namespace te_fl::cuda {

// Reads the settings. `file`: path of the file of earlier choices; NULL or empty: none. `tune`:
// products that the file lacks are measured and added. `host` is used for logging and must stay
// valid. Call it once, before any product.
void configure_gemm_choices(const char* file, bool tune, const te_fl_host_api* host);

// The error of the settings with its remedy; empty if there is none. find_gemm_choice() throws it.
std::string gemm_choices_error();

// Finds the choice for `problem` on this device, with its power limit and this library version.
// False if there is none. Throws if the file cannot be used. Never waits for a measurement.
bool find_gemm_choice(int device, const std::string& problem, cublasLtMatmulAlgo_t& algo);

// Stores the heuristic's algorithm for `problem`, for algorithm_words(). Thread-safe.
void note_algorithm(int device, const std::string& problem, const cublasLtMatmulAlgo_t& algo);

// A text that says which algorithm a product uses and its origin: the file, the heuristic (if an
// earlier call asked it), or "decided at first use". `measurable`: the problem is measured if
// measuring is on. The library is only asked for attributes of an algorithm. Throws like
// find_gemm_choice().
std::string algorithm_words(int device, const std::string& problem, bool measurable);

// True if products without a choice are measured.
bool tunes_gemm() noexcept;

// A product that writes to scratch memory.
struct GemmTrial {
  // Enqueues the product once; false if the library refuses the algorithm.
  std::function<bool(const cublasLtMatmulAlgo_t&)> run;
  // True if candidate i gives the result of candidate 0. Waits for the stream.
  std::function<bool(size_t i)> agrees;
};

// Times the candidates on `stream`; the heuristic's first is candidate 0. Times every candidate
// briefly, then the fastest ones in rounds under load (gemm_selection.hpp). Takes about 4 s.
// Returns nothing if no candidate runs. For use by measured_gemm_choice().
std::optional<GemmChoice> time_candidates(int device, const std::string& problem,
                                          const std::vector<cublasLtMatmulAlgo_t>& candidates,
                                          const GemmTrial& trial, cudaStream_t stream);

// The choice for a problem that find_gemm_choice() did not find: the result of `measure`, which is
// then stored in the file, or that of another thread or process that measured meanwhile
// (ChoiceBook::find_or_measure). Returns `otherwise` if no candidate runs.
cublasLtMatmulAlgo_t measured_gemm_choice(
    int device, const std::string& problem, const cublasLtMatmulAlgo_t& otherwise,
    const std::function<std::optional<GemmChoice>()>& measure);

// Logs that a product was not measured.
void warn_not_measured(const std::string& problem, const char* why);

}  // namespace te_fl::cuda
