#include "progress.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace train_gpt {

bool on_terminal() {
  const char* kind = std::getenv("TERM");
  return isatty(STDOUT_FILENO) != 0 && kind != nullptr && std::string_view(kind) != "dumb";
}

Progress::Progress(int64_t steps, double tokens_per_step, int64_t every)
    : steps_(steps),
      every_(every),
      tokens_per_step_(tokens_per_step),
      terminal_(on_terminal()),
      start_(std::chrono::steady_clock::now()) {}

double Progress::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Progress::step(int64_t done, double loss) {
  constexpr const char* kBeginning = "\r\x1b[K";  // erases the current terminal line
  const double now = seconds();
  const double rate = tokens_per_step_ * static_cast<double>(done) / now;
  if (done == 1 || done % every_ == 0 || done == steps_) {
    std::printf("%sstep %5lld  loss %.4f nats/byte  %8.0f tokens/s  %6.1f s\n",
                terminal_ ? kBeginning : "", static_cast<long long>(done), loss, rate, now);
    std::fflush(stdout);
  } else if (terminal_ && now - rewritten_at_ >= 0.1) {
    rewritten_at_ = now;
    std::printf("%sstep %lld of %lld  loss %.3f  about %.0f s to go", kBeginning,
                static_cast<long long>(done), static_cast<long long>(steps_), loss,
                now / static_cast<double>(done) * static_cast<double>(steps_ - done));
    std::fflush(stdout);
  }
}

}  // namespace train_gpt
