#include "comm/socket.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

namespace te_fl::comm {
namespace {

constexpr int kBacklog = 1024;
using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const char* host, int port, int flags, std::string& why) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    why = std::string("its name has no address: ") + ::gai_strerror(error);
    list = nullptr;
  }
  return {list, &::freeaddrinfo};
}

// The time until the deadline in milliseconds, rounded up, for poll().
int remaining_ms(Deadline deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
}

// Waits until the socket is ready. False after the deadline.
bool wait_for(const Socket& socket, short events, Deadline deadline) {
  pollfd entry{socket.fd(), events, 0};
  for (;;) {
    const int ready = ::poll(&entry, 1, remaining_ms(deadline));
    if (ready > 0) return true;
    if (ready == 0 && remaining_ms(deadline) == 0) return false;
    if (ready < 0 && errno != EINTR) return true;  // the next system call reports the error
  }
}

bool again(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

Socket new_socket(const addrinfo& at) {
  return Socket(
      ::socket(at.ai_family, at.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, at.ai_protocol));
}

// True if a TCP socket is connected to itself. This can happen when no process listens on the port
// and the port is in the ephemeral range.
bool connected_to_itself(const Socket& socket) {
  sockaddr_storage mine{}, peer{};
  socklen_t mine_bytes = sizeof mine, peer_bytes = sizeof peer;
  return ::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&mine), &mine_bytes) == 0 &&
         ::getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&peer), &peer_bytes) == 0 &&
         mine_bytes == peer_bytes && std::memcmp(&mine, &peer, mine_bytes) == 0;
}

Socket connect_to(const addrinfo& at, Deadline deadline, std::string& why) {
  Socket socket = new_socket(at);
  int error = 0;
  if (!socket || ::connect(socket.fd(), at.ai_addr, at.ai_addrlen) != 0) error = errno;
  if (socket && error == EINPROGRESS) {
    socklen_t bytes = sizeof error;
    error = ETIMEDOUT;
    if (wait_for(socket, POLLOUT, deadline))
      ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  }
  if (error == 0 && connected_to_itself(socket)) error = ECONNREFUSED;
  if (error != 0) {
    why = std::strerror(error);
    return Socket();
  }
  const int on = 1;
  ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return socket;
}

bool is_loopback(const addrinfo& at) {
  if (at.ai_family == AF_INET) {
    const auto* in = reinterpret_cast<const sockaddr_in*>(at.ai_addr);
    return (ntohl(in->sin_addr.s_addr) >> 24) == 127;
  }
  return at.ai_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(at.ai_addr)->sin6_addr);
}

Socket listen_at(const addrinfo& at, std::string& why) {
  Socket socket = new_socket(at);
  const int on = 1, off = 0;
  if (socket) {
    ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (at.ai_family == AF_INET6)
      ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  }
  if (socket && ::bind(socket.fd(), at.ai_addr, at.ai_addrlen) == 0 &&
      ::listen(socket.fd(), kBacklog) == 0)
    return socket;
  why = std::strerror(errno);
  return Socket();
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

Transfer send_all(const Socket& socket, const void* data, size_t bytes, Deadline deadline) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket.fd(), at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && !again(errno)) return Transfer::kClosed;
    if (sent < 0 && !wait_for(socket, POLLOUT, deadline)) return Transfer::kTimeout;
    if (sent < 0) continue;
    at += sent;
    bytes -= static_cast<size_t>(sent);
  }
  return Transfer::kDone;
}

Transfer receive_all(const Socket& socket, void* data, size_t bytes, Deadline deadline) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(socket.fd(), at, bytes, 0);
    if (got == 0 || (got < 0 && !again(errno))) return Transfer::kClosed;
    if (got < 0 && !wait_for(socket, POLLIN, deadline)) return Transfer::kTimeout;
    if (got < 0) continue;
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return Transfer::kDone;
}

Socket connect_once(const std::string& host, int port, Deadline deadline, std::string& why) {
  const Addresses list = resolve(host.c_str(), port, 0, why);
  for (const addrinfo* at = list.get(); at != nullptr; at = at->ai_next) {
    if (Socket socket = connect_to(*at, deadline, why)) return socket;
  }
  return Socket();
}

Result<Socket> listen_on(const std::string& host, int port) {
  std::string why;
  const bool local = host == "localhost";
  const Addresses named = resolve(host.c_str(), port, local ? 0 : AI_NUMERICHOST, why);
  const bool loopback = named != nullptr && is_loopback(*named);
  const Addresses any =
      loopback ? Addresses(nullptr, &::freeaddrinfo) : resolve(nullptr, port, AI_PASSIVE, why);
  const addrinfo* const first = loopback ? named.get() : any.get();
  // Tries IPv6 first, since such a socket also accepts IPv4 connections.
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* at = first; at != nullptr; at = at->ai_next) {
      if (at->ai_family != family) continue;
      if (Socket socket = listen_at(*at, why)) return socket;
      if (why == std::strerror(EADDRINUSE)) return failed_precondition(why);
    }
  }
  return failed_precondition(why);
}

}  // namespace te_fl::comm
