// Wrappers for Gloo's buffers: a failed wait reports the ranks that it waited for, and abort() ends
// waits.
#pragma once

#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace te_fl::gloo_ranks {

// A send or receive failed. `ranks`: its peers.
class PeerError : public std::runtime_error {
 public:
  PeerError(const std::string& text, std::vector<int> waited_for)
      : std::runtime_error(text), ranks(std::move(waited_for)) {}
  std::vector<int> ranks;
};

class WatchedBuffer;

// Gloo's TCP context with wrapped buffers. abort() may be called from any thread while the context
// exists; the other functions follow Gloo's rules.
class WatchedContext final : public ::gloo::transport::Context {
 public:
  explicit WatchedContext(std::shared_ptr<::gloo::transport::Context> inner);
  std::unique_ptr<::gloo::transport::Pair>& getPair(int rank) override;
  std::unique_ptr<::gloo::transport::Pair>& createPair(int rank) override;
  std::unique_ptr<::gloo::transport::UnboundBuffer> createUnboundBuffer(void* data,
                                                                        size_t bytes) override;
  // Closes all connections. Pending and later waits throw PeerError without ranks.
  void abort();
  bool aborted() const noexcept { return aborted_.load(std::memory_order_acquire); }

 private:
  friend class WatchedBuffer;
  std::shared_ptr<::gloo::transport::Context> inner_;
  std::atomic<bool> aborted_ = false;
  std::mutex mutex_;
  std::set<WatchedBuffer*> buffers_;
};

}  // namespace te_fl::gloo_ranks
