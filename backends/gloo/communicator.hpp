// One rank's part of a communicator over Gloo.
#pragma once

#include <gloo/context.h>
#include <gloo/transport/device.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "te_fl/plugin.h"
#include "watched.hpp"

namespace te_fl::gloo_ranks {

// The connections to all other ranks: a Gloo context whose addresses are exchanged through te-fl's
// store.
class Mesh : public ::gloo::Context {
 public:
  Mesh(int rank, int size) : Context(rank, size) {}
  // Waits for the other ranks, at most `timeout`. Throws backend::Error.
  void connect(std::shared_ptr<::gloo::transport::Device> device, const te_fl_comm_config& config,
               std::chrono::milliseconds timeout, const te_fl_error_sink* errors);
  WatchedContext& watched() { return static_cast<WatchedContext&>(*transportContext_); }
  // Returns those of `ranks` whose connection Gloo's error message `text` mentions, each once; all
  // of `ranks` if it mentions none.
  std::vector<int> named_in(const std::string& text, const std::vector<int>& ranks) const;

 private:
  std::vector<std::string> addresses_;  // in the form of Gloo's messages
};

// The parts of one tensor that are sent to, or received from, each rank. Sizes and offsets are in
// bytes.
struct Parts {
  char* base = nullptr;
  std::vector<size_t> offset, bytes;
  // Consecutive parts; in the first constructor they have equal sizes.
  Parts(char* data, int ranks, size_t part_bytes);
  Parts(char* data, std::vector<size_t> part_bytes);
};

// A send or receive that has been started.
struct Transfer {
  std::unique_ptr<::gloo::transport::UnboundBuffer> buffer;
  bool sends = false;
};

// Ops must come from one thread at a time; abort() and failure() may be called from any thread. In
// a forked child, ops are refused and the destructor frees nothing.
class Communicator {
 public:
  Communicator(const te_fl_comm_config& config, std::shared_ptr<::gloo::transport::Device> device,
               const te_fl_error_sink* errors);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }
  const std::shared_ptr<Mesh>& mesh() const noexcept { return mesh_; }

  // Runs an op. A failure is recorded, reported to the other ranks through the store, and thrown as
  // COMM_FAILED with the name `op`. All later ops then fail as well.
  void run(const char* op, const std::function<void()>& f);
  // The recorded failure of an op; empty if there is none.
  std::string failure() const;
  void abort();

  // Returns the message tag of the next op that involves all ranks. If ranks make calls of
  // different kind or size, their tags differ, so the calls time out instead of receiving wrong
  // data.
  uint32_t next_tag(uint64_t kind, uint64_t bytes);
  // Sends each other rank its part of `out`, and receives a part from each into `in`. This rank's
  // own part is not copied. Times out if another rank makes a call of another kind, because the
  // tags then differ (next_tag()).
  void exchange(uint64_t kind, const Parts& out, const Parts& in);
  Transfer begin_send(const void* data, size_t bytes, int peer);
  Transfer begin_receive(void* data, size_t bytes, int peer);
  void wait(Transfer& transfer) const;

 private:
  [[noreturn]] void fail(const char* op, const std::string& why);
  std::string reported(const std::string& mine);

  std::string name_;
  int rank_, size_;
  std::chrono::milliseconds timeout_;
  const te_fl_comm_store* store_;
  pid_t process_;
  std::shared_ptr<Mesh> mesh_;
  uint64_t calls_ = 0;                     // number of ops that involved all ranks
  std::vector<uint64_t> sent_, received_;  // number of messages by peer
  mutable std::mutex mutex_;
  std::string failure_;
};

}  // namespace te_fl::gloo_ranks
