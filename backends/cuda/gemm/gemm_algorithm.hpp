// Chooses the cuBLASLt algorithm of a GEMM: one stored in a file, the fastest in a measurement, or
// the heuristic's first.
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

// Applies the settings. `file`: path of the file of earlier choices; NULL or empty: none. `tune`:
// GEMMs that the file lacks are measured and added. `host` is used for logging and must stay valid.
// Call it once, before any GEMM.
void configure_gemm_choices(const char* file, bool tune, const te_fl_host_api* host);

// Returns the error in the settings and its remedy; empty if there is no error. find_gemm_choice()
// throws this error.
std::string gemm_choices_error();

// Looks up the stored choice for `problem` on this device, with its power limit and this library
// version, and stores it in `algo`. Returns false if there is none. Throws if the file cannot be
// used. Never waits for a measurement.
bool find_gemm_choice(int device, const std::string& problem, cublasLtMatmulAlgo_t& algo);

// Stores the heuristic's algorithm for `problem`, for algorithm_words(). Thread-safe.
void note_algorithm(int device, const std::string& problem, const cublasLtMatmulAlgo_t& algo);

// Returns text that names the algorithm of a GEMM and its origin: the file, the heuristic (if an
// earlier call has queried it), or "decided at first use". `measurable`: the problem is measured if
// measuring is on. Does not run the library's heuristic. Throws like find_gemm_choice().
std::string algorithm_words(int device, const std::string& problem, bool measurable);

// Returns true if GEMMs without a stored choice are measured.
bool tunes_gemm() noexcept;

// A GEMM that writes to scratch memory, for measuring algorithms.
struct GemmTrial {
  // Enqueues the GEMM once; returns false if the library refuses the algorithm.
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

// Returns the choice for a problem that find_gemm_choice() did not find. If another thread or
// process has meanwhile measured the problem, returns its choice; else returns the result of
// `measure`, which is added to the file (ChoiceBook::find_or_measure). Returns `otherwise` if no
// candidate runs.
cublasLtMatmulAlgo_t measured_gemm_choice(
    int device, const std::string& problem, const cublasLtMatmulAlgo_t& otherwise,
    const std::function<std::optional<GemmChoice>()>& measure);

// Logs a warning that a GEMM was not measured.
void warn_not_measured(const std::string& problem, const char* why);

}  // namespace te_fl::cuda
