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

// Connections to every other rank: Gloo's context, with the ranks' addresses in te-fl's store.
class Mesh : public ::gloo::Context {
 public:
  Mesh(int rank, int size) : Context(rank, size) {}
  // Waits for the other ranks, at most `timeout`. Throws backend::Error.
  void connect(std::shared_ptr<::gloo::transport::Device> device, const te_fl_comm_config& config,
               std::chrono::milliseconds timeout, const te_fl_error_sink* errors);
  WatchedContext& watched() { return static_cast<WatchedContext&>(*transportContext_); }
  // Those of `ranks` whose connection the text of Gloo's is about; all if it names none;
  // each once.
  std::vector<int> named_in(const std::string& text, const std::vector<int>& ranks) const;

 private:
  std::vector<std::string> addresses_;  // as Gloo writes them in its texts
};

// Parts of one tensor for, or from, each rank; bytes.
struct Parts {
  char* base = nullptr;
  std::vector<size_t> offset, bytes;
  // Equal parts, one behind the other.
  Parts(char* data, int ranks, size_t part_bytes);
  Parts(char* data, std::vector<size_t> part_bytes);
};

// A send or receive that was begun.
struct Transfer {
  std::unique_ptr<::gloo::transport::UnboundBuffer> buffer;
  bool sends = false;
};

// Ops come from one thread at a time; abort() and failure() from any. In the child of a fork, ops
// are refused and the destructor leaves everything to the parent.
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

  // Runs an op. Its failure is kept, told to the other ranks by the store, and thrown as
  // COMM_FAILED with `op`; so is every later op.
  void run(const char* op, const std::function<void()>& f);
  // The failure that an op met; empty: none.
  std::string failure() const;
  void abort();

  // The tag of the next op of all ranks. Calls of another op, size or kind get another tag, so that
  // they wait for each other in vain and no bytes go where they do not fit.
  uint32_t next_tag(uint64_t kind, uint64_t bytes);
  // Gives parts `out` of all ranks to them, and takes theirs into `in`; this rank's own is left. It
  // waits in vain for a call of another kind, as that of next_tag() does.
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
  uint64_t calls_ = 0;                     // of all ranks
  std::vector<uint64_t> sent_, received_;  // by peer
  mutable std::mutex mutex_;
  std::string failure_;
};

}  // namespace te_fl::gloo_ranks
