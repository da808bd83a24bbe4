#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>

#include "comm/file_store.hpp"
#include "comm/socket.hpp"

namespace te_fl::comm {

// The key-value server of a job. A thread of rank 0's process runs the server from the constructor
// to the destructor. The destructor reports to all waiting ranks that rank 0 has ended. The thread
// blocks all signals. In a forked child the destructor only closes inherited descriptors.
//
// The protocol detects mistakes, such as another program or another job at the port. It does not
// protect against attackers: like a collective library, it needs a network whose machines trust
// each other.
class TcpServer {
 public:
  TcpServer(Socket listening, const StoreRank& rank);
  ~TcpServer();
  TcpServer(const TcpServer&) = delete;
  TcpServer& operator=(const TcpServer&) = delete;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<std::thread> thread_;
  pid_t process_;
};

}  // namespace te_fl::comm
