#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <thread>

#include "comm/file_store.hpp"
#include "comm/socket.hpp"

namespace te_fl::comm {

// The values of a job, served by a thread of rank 0's process from the constructor to the
// destructor, which tells every rank that waits that rank 0 has ended. The thread takes no signal.
// In the child of a fork the destructor only closes what the child inherited.
//
// The protocol keeps mistakes apart, another program or job, not attackers: it is for a network
// whose machines trust each other, as that of a collective library is.
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
