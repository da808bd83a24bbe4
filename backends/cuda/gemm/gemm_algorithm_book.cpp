#include "gemm/gemm_algorithm_book.hpp"

#include <utility>

#include "te_fl/backend.hpp"

namespace te_fl::cuda {
namespace {

[[noreturn]] void fail(const std::string& text) {
  throw backend::Error(TE_FL_FAILED_PRECONDITION | TE_FL_CLEAN, text);
}

// Calls `f`, which reads or writes the file of choices, and adds the setting's name and a remedy to
// the message of its exceptions.
template <class F>
std::vector<GemmChoice> of_file(F&& f) {
  try {
    return f();
  } catch (const std::exception& e) {
    fail(std::string("TE_FL_CUDA_GEMM_FILE: ") + e.what() +
         "; name a file in a folder that can be written, or remove what is there and measure again "
         "with TE_FL_CUDA_GEMM_TUNE=1");
  }
}

}  // namespace

void ChoiceBook::configure(const std::string& file, bool tune) {
  std::vector<GemmChoice> there;
  std::string error;
  if (file.empty() && tune) {
    error =
        "TE_FL_CUDA_GEMM_TUNE is 1 and TE_FL_CUDA_GEMM_FILE is unset; name the file that the "
        "choices go to, or leave the measuring out";
  }
  if (!file.empty()) {
    try {
      there = read_choices(file, tune);
    } catch (const std::exception& e) {
      error = std::string("TE_FL_CUDA_GEMM_FILE: ") + e.what() +
              "; name a file that TE_FL_CUDA_GEMM_TUNE=1 has written, or unset it";
    }
  }
  const std::lock_guard lock(mutex_);
  file_ = file;
  error_ = std::move(error);
  all_ = std::move(there);
  tune_ = tune;
}

std::string ChoiceBook::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool ChoiceBook::empty() const {
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) fail(error_);
  return all_.empty();
}

std::optional<GemmChoice> ChoiceBook::find(const GemmChoice& key) const {
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) fail(error_);
  const GemmChoice* found =
      find_choice(all_, key.device, key.library, key.power_limit, key.problem);
  return found != nullptr ? std::optional(*found) : std::nullopt;
}

void ChoiceBook::take_up(std::vector<GemmChoice> there) {
  const std::lock_guard lock(mutex_);
  all_ = merge_choices(std::move(there), all_);
}

std::optional<GemmChoice> ChoiceBook::find_or_measure(
    int device, const GemmChoice& key, const std::function<std::optional<GemmChoice>()>& measure) {
  const std::lock_guard turn(turns_.at(static_cast<size_t>(device)));
  std::string file;
  {
    const std::lock_guard lock(mutex_);
    file = file_;
  }
  take_up(of_file([&] { return read_choices(file, true); }));
  if (auto found = find(key)) return found;
  const std::optional<GemmChoice> measured = measure();
  if (!measured) return std::nullopt;
  take_up(of_file([&] { return add_choices(file, {*measured}); }));
  return find(key);
}

}  // namespace te_fl::cuda
