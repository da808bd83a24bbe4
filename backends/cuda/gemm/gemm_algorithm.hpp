// Chooses the cuBLASLt algorithm of a product: what a file says, what was measured, or the first
// that the library's heuristic names.
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

// Reads the settings: `file` (NULL or empty: none) holds earlier choices, `tune` says that products
// that it lacks are measured and added. Called once, before any product.
// `host` logs, and stays valid while there are calls.
void configure_gemm_choices(const char* file, bool tune, const te_fl_host_api* host);

// Says what is wrong with the settings, with the way out; empty if nothing is. find_gemm_choice()
// throws it.
std::string gemm_choices_error();

// Throws if the file cannot be used; finds the choice for `problem` on this device, its power limit
// and this library, if there is one. Never waits for a measurement.
bool find_gemm_choice(int device, const std::string& problem, cublasLtMatmulAlgo_t& algo);

// Keeps what the heuristic named for `problem`, for algorithm_words(). Thread-safe.
void note_algorithm(int device, const std::string& problem, const cublasLtMatmulAlgo_t& algo);

// Says which algorithm a product takes and who chose it, as words: the file, the heuristic when an
// earlier call asked it, or that this is decided at first use. `measurable`: the problem is one
// that is measured where measuring is on. Asks the library nothing but an algorithm's attributes;
// throws as find_gemm_choice().
std::string algorithm_words(int device, const std::string& problem, bool measurable);

// True if products without a choice are to be measured.
bool tunes_gemm() noexcept;

// A product in scratch memory.
struct GemmTrial {
  // Enqueues it once, false if the library refuses that algorithm.
  std::function<bool(const cublasLtMatmulAlgo_t&)> run;
  // True if candidate i computes what the first does; waits for the stream.
  std::function<bool(size_t i)> agrees;
};

// Times the candidates on `stream`, of which the heuristic's first is the first: a look at each,
// and rounds among the fastest on a chip that is under load (gemm_selection.hpp); some 4 s. Nothing
// if none runs. For use by measured_gemm_choice().
std::optional<GemmChoice> time_candidates(int device, const std::string& problem,
                                          const std::vector<cublasLtMatmulAlgo_t>& candidates,
                                          const GemmTrial& trial, cudaStream_t stream);

// The choice for a problem that find_gemm_choice() did not find: what `measure` returns, kept in
// the file, or what another thread or process has measured meanwhile (ChoiceBook::find_or_measure);
// `otherwise` if nothing runs.
cublasLtMatmulAlgo_t measured_gemm_choice(
    int device, const std::string& problem, const cublasLtMatmulAlgo_t& otherwise,
    const std::function<std::optional<GemmChoice>()>& measure);

// Logs that a product was not measured.
void warn_not_measured(const std::string& problem, const char* why);

}  // namespace te_fl::cuda
