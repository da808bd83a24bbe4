// One rank of a communicator of NCCL, and what its life must not wait for: other ranks. NCCL's
// communicators block: making one waits for all ranks, and so may destroying or aborting one, since
// the threads by which ranks of one machine serve each other end together. These three run on
// threads of their own. (Communicators that do not block start a thread in every collective.)
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>

#include "plugin/nccl.hpp"
#include "te_fl/plugin.h"

namespace te_fl::cuda {

// Throws the error of one of NCCL's functions, in NCCL's words and with what to do.
[[noreturn]] void throw_nccl(const Nccl& nccl, int status, const char* function,
                             void* communicator);

// The part that threads of NcclRanks share with it.
struct NcclLife {
  const Nccl* nccl = nullptr;
  int device = 0;
  std::atomic<void*> handle{nullptr};  // until its end begins
  std::mutex mutex;                    // of what follows, held for moments
  bool made = false;
  int status = kNcclSuccess;  // of making it
  std::string error;          // words for a status that is an error
  std::atomic<bool> aborted{false};
  std::atomic<int> calls{0};  // threads that are inside NCCL with it
};

class NcclRanks {
 public:
  // Begins to make it by `make(&handle)`, which returns NCCL's status, on a thread with the
  // config's device current. `function` is NCCL's, for messages.
  NcclRanks(const Nccl& nccl, const te_fl_comm_config& config, const char* function,
            std::function<int(void**)> make);
  // Waits for the device's work up to the config's time-out, after which it is aborted, and for
  // the other ranks' ends a moment, after which NCCL's part is left to its thread.
  ~NcclRanks();

  // True once it can be used; throws what NCCL said if it could not be made.
  bool ready() const;
  void abort();
  // Throws COMM_FAILED if NCCL met a failure outside of a call, or if it was aborted.
  void check() const;

  const Nccl& nccl() const noexcept { return *life_->nccl; }

  // A thread is inside NCCL with the communicator, which is not freed before it has left.
  class Use {
   public:
    explicit Use(const NcclRanks& ranks);  // throws if it was aborted or is not ready
    Use(Use&& other) noexcept = default;
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (life_ != nullptr) life_->calls.fetch_sub(1, std::memory_order_release);
    }
    void* handle() const noexcept { return handle_; }
    const Nccl& nccl() const noexcept { return *life_->nccl; }
    // Throws if `status`, of `function`, is an error, or if it was aborted meanwhile.
    void check(int status, const char* function) const;

   private:
    std::shared_ptr<NcclLife> life_;
    void* handle_ = nullptr;
  };

 private:
  void run_aside(std::function<void(NcclLife&)> work);
  // As that, for the end of it, which comes on this thread where no other can be made.
  void end_aside(void (*work)(NcclLife&)) noexcept;

  uint32_t timeout_ms_;  // 0: for ever
  std::shared_ptr<NcclLife> life_;
  std::future<void> aside_;  // the thread that makes it, then the one that ends it
};

}  // namespace te_fl::cuda
