#pragma once

#include <cstdint>
#include <utility>

#include "policy/current.hpp"

namespace te_fl::nn::detail {

// While this object lives, the calling thread has no policy scope.
class WithoutPolicyScope {
 public:
  WithoutPolicyScope() : previous_(std::exchange(policy::t_scope, 0)) {}
  ~WithoutPolicyScope() { policy::t_scope = previous_; }
  WithoutPolicyScope(const WithoutPolicyScope&) = delete;
  WithoutPolicyScope& operator=(const WithoutPolicyScope&) = delete;

 private:
  uint32_t previous_;
};

}  // namespace te_fl::nn::detail
