#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "comm/store_text.hpp"

// TCP sockets for the store: nothing here waits beyond a deadline, and nothing raises SIGPIPE.
namespace te_fl::comm {

// Owns a file descriptor. Movable; one thread at a time.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) noexcept : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();
  int fd() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

enum class Transfer { kDone, kClosed, kTimeout };

// All of `bytes`, or the other side closed the connection (or it broke), or the time is over.
Transfer send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline);
Transfer receive_all(const Socket& socket, void* data, size_t bytes, Deadline deadline);

// One attempt at each address of the host; non-blocking sockets. Without a connection `why` says
// what failed.
Socket connect_once(const std::string& host, int port, Deadline deadline, std::string& why);

// Listens on `host` where that is this machine's loopback, and on all addresses of the machine
// otherwise: a host's own name often means its loopback to itself. FAILED_PRECONDITION, and why.
Result<Socket> listen_on(const std::string& host, int port);

}  // namespace te_fl::comm
