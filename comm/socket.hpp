#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "comm/store_text.hpp"

// TCP sockets for the store. No function blocks beyond its deadline, and none raises SIGPIPE.
namespace te_fl::comm {

// Owns a file descriptor. Movable. Not thread-safe.
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

// Transfer all `bytes`, unless the peer closes the connection, an error occurs, or the deadline
// passes.
Transfer send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline);
Transfer receive_all(const Socket& socket, void* data, size_t bytes, Deadline deadline);

// Tries each address of the host once, with non-blocking sockets. If no connection is made, `why`
// gets the reason.
Socket connect_once(const std::string& host, int port, Deadline deadline, std::string& why);

// Listens on `host` if it is a loopback address of this machine; otherwise on all addresses, since
// a host's own name often resolves to its loopback address. FAILED_PRECONDITION with the reason.
Result<Socket> listen_on(const std::string& host, int port);

}  // namespace te_fl::comm
