#include "watched.hpp"

#include <gloo/common/error.h>
#include <gloo/transport/pair.h>

#include <algorithm>
#include <chrono>

namespace te_fl::gloo_ranks {

class WatchedBuffer final : public ::gloo::transport::UnboundBuffer {
 public:
  WatchedBuffer(WatchedContext& context, std::unique_ptr<::gloo::transport::UnboundBuffer> inner)
      : UnboundBuffer(inner->ptr, inner->size), context_(context), inner_(std::move(inner)) {
    const std::lock_guard lock(context_.mutex_);
    context_.buffers_.insert(this);
  }
  ~WatchedBuffer() override {
    const std::lock_guard lock(context_.mutex_);
    context_.buffers_.erase(this);
  }

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    return wait(receives_, rank, [&](int* from) { return inner_->waitRecv(from, timeout); });
  }
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    return wait(sends_, rank, [&](int* to) { return inner_->waitSend(to, timeout); });
  }
  void abortWaitRecv() override { inner_->abortWaitRecv(); }
  void abortWaitSend() override { inner_->abortWaitSend(); }

  void send(int to, uint64_t slot, size_t offset, size_t bytes) override {
    sends_.push_back(to);
    run_watched({to}, [&] { inner_->send(to, slot, offset, bytes); });
  }
  void recv(int from, uint64_t slot, size_t offset, size_t bytes) override {
    receives_.push_back(from);
    run_watched({from}, [&] { inner_->recv(from, slot, offset, bytes); });
  }
  void recv(std::vector<int> from, uint64_t slot, size_t offset, size_t bytes) override {
    receives_.insert(receives_.end(), from.begin(), from.end());
    run_watched(from, [&] { inner_->recv(from, slot, offset, bytes); });
  }

 private:
  // Runs f and converts its exceptions to PeerErrors with `ranks`.
  template <class F>
  void run_watched(const std::vector<int>& ranks, F&& f) {
    if (context_.aborted()) throw PeerError("it was aborted", {});
    try {
      f();
    } catch (const ::gloo::Exception& e) {
      if (context_.aborted()) throw PeerError("it was aborted", {});
      throw PeerError(e.what(), ranks);
    }
  }

  // `pending`: the ranks of transfers that have not been waited for.
  template <class F>
  bool wait(std::vector<int>& pending, int* rank, F&& f) {
    int peer = -1;
    run_watched(pending, [&] {
      if (!f(&peer)) throw PeerError("it was aborted", {});
    });
    const auto at = std::find(pending.begin(), pending.end(), peer);
    if (at != pending.end()) pending.erase(at);
    if (rank != nullptr) *rank = peer;
    return true;
  }

  WatchedContext& context_;
  std::unique_ptr<::gloo::transport::UnboundBuffer> inner_;
  std::vector<int> sends_, receives_;
};

WatchedContext::WatchedContext(std::shared_ptr<::gloo::transport::Context> inner)
    : Context(inner->rank, inner->size), inner_(std::move(inner)) {
  setTimeout(inner_->getTimeout());
}

std::unique_ptr<::gloo::transport::Pair>& WatchedContext::getPair(int peer) {
  return inner_->getPair(peer);
}

std::unique_ptr<::gloo::transport::Pair>& WatchedContext::createPair(int peer) {
  return inner_->createPair(peer);
}

std::unique_ptr<::gloo::transport::UnboundBuffer> WatchedContext::createUnboundBuffer(
    void* data, size_t bytes) {
  return std::make_unique<WatchedBuffer>(*this, inner_->createUnboundBuffer(data, bytes));
}

void WatchedContext::abort() {
  aborted_.store(true, std::memory_order_release);
  {
    const std::lock_guard lock(mutex_);
    for (WatchedBuffer* buffer : buffers_) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
  }
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    if (auto& pair = inner_->getPair(peer)) pair->close();
  }
}

}  // namespace te_fl::gloo_ranks
