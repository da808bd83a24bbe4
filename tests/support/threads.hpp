// Threads that use one thing together, so that the thread sanitizer sees what no lock orders.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace te_fl::testing {

// Calls each function `rounds` times in a row, on a thread for each. The threads begin together and
// give way after each call, so that they take turns where there are few cores. Neither orders any
// memory, so no race of the functions is hidden. A race of one function is seen most surely where
// its thread calls nothing else that takes the same lock.
inline void together(int rounds, const std::vector<std::function<void(int round)>>& functions) {
  std::atomic<size_t> ready{0};
  std::vector<std::thread> threads;
  for (const auto& function : functions) {
    threads.emplace_back([&] {
      ready.fetch_add(1, std::memory_order_relaxed);
      while (ready.load(std::memory_order_relaxed) < functions.size()) std::this_thread::yield();
      for (int round = 0; round < rounds; ++round) {
        function(round);
        std::this_thread::yield();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace te_fl::testing
