// Chooses how the router's kernels divide tokens among threads: pure functions of metadata, so
// tests run without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace te_fl::cuda {

// The lanes of a warp that share a token, and the experts that each of them has in registers.
struct RouterChoice {
  int lanes = 1;
  int experts = 8;

  std::string text() const {
    return std::to_string(lanes) + (lanes == 1 ? " lane" : " lanes") + " of " +
           std::to_string(experts) + " experts for a token";
  }
};

// Chooses the fewest lanes that hold `experts` experts, which are at most 1024 (kMostExperts). A
// lane holds more than eight experts only if a whole warp with eight each would not hold them.
constexpr RouterChoice choose_router(int64_t experts) noexcept {
  RouterChoice choice;
  while (choice.lanes < 32 && choice.lanes * choice.experts < experts) choice.lanes *= 2;
  while (choice.lanes * choice.experts < experts) choice.experts *= 2;
  return choice;
}

constexpr int kRouterThreads = 256;  // of a block; equals kThreads of element.cuh

// Number of thread blocks: enough for all tokens, at most 32 per multiprocessor.
constexpr int64_t router_blocks(const RouterChoice& choice, int64_t tokens,
                                int multiprocessors) noexcept {
  const int64_t each = kRouterThreads / choice.lanes;
  return std::clamp<int64_t>((tokens + each - 1) / each, 1, int64_t{32} * multiprocessors);
}

}  // namespace te_fl::cuda
