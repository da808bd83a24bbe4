// One rank of an NCCL communicator. Its construction and destruction must not block the host on
// other ranks, but NCCL's functions block: creation waits for all ranks, and destruction and abort
// may wait too, because the proxy threads of all ranks on a machine end together. So creation,
// destruction and abort run on separate threads. (NCCL's non-blocking communicators are no
// alternative, because they start a thread in every collective.)
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

// Throws the error of an NCCL function: NCCL's own text and a remedy.
[[noreturn]] void throw_nccl(const Nccl& nccl, int status, const char* function,
                             void* communicator);

// State that an NcclRanks shares with the threads it starts.
struct NcclLife {
  const Nccl* nccl = nullptr;
  int device = 0;
  std::atomic<void*> handle{nullptr};  // NULL before creation and once destruction or abort begins
  std::mutex mutex;                    // guards the following members; held briefly
  bool made = false;
  int status = kNcclSuccess;  // status of the creation
  std::string error;          // text of a status that is an error
  std::atomic<bool> aborted{false};
  std::atomic<int> calls{0};  // threads inside NCCL with this communicator
};

class NcclRanks {
 public:
  // Starts the creation of the communicator on a separate thread, with the config's device current.
  // `make(&handle)` returns NCCL's status. `function` is the name of NCCL's function, for error
  // messages.
  NcclRanks(const Nccl& nccl, const te_fl_comm_config& config, const char* function,
            std::function<int(void**)> make);
  // Waits for the device's work, at most for the config's time-out, then destroys the communicator,
  // or aborts it if the time-out expired. Destroying it can wait for the other ranks. The
  // destructor waits at most two seconds for that; then NCCL's function continues on a separate
  // thread.
  ~NcclRanks();

  // Returns true once the communicator can be used. Throws the error of the creation if it failed.
  bool ready() const;
  void abort();
  // Throws COMM_FAILED if NCCL reports an asynchronous error, or if the communicator was aborted.
  void check() const;

  const Nccl& nccl() const noexcept { return *life_->nccl; }

  // Marks that a thread is inside NCCL with the communicator. An abort waits for such threads
  // before it frees the communicator.
  class Use {
   public:
    explicit Use(const NcclRanks& ranks);  // throws if the communicator was aborted or is not ready
    Use(Use&& other) noexcept = default;
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (life_ != nullptr) life_->calls.fetch_sub(1, std::memory_order_release);
    }
    void* handle() const noexcept { return handle_; }
    const Nccl& nccl() const noexcept { return *life_->nccl; }
    // Throws if the `status` of `function` is an error, or if the communicator was aborted
    // meanwhile.
    void check(int status, const char* function) const;

   private:
    std::shared_ptr<NcclLife> life_;
    void* handle_ = nullptr;
  };

 private:
  void run_aside(std::function<void(NcclLife&)> work);
  // Like run_aside(), for destroying or aborting the communicator. Runs `work` on the calling
  // thread if no thread can be created.
  void end_aside(void (*work)(NcclLife&)) noexcept;

  uint32_t timeout_ms_;  // 0: no limit
  std::shared_ptr<NcclLife> life_;
  std::future<void> aside_;  // the thread that creates the communicator, later the thread that ends
                             // it
};

}  // namespace te_fl::cuda
