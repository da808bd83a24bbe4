// Selects implementations in code: globally, within a scope, and on another thread through a
// captured scope.
#include <cstdio>
#include <thread>

#include "te_fl/te_fl.hpp"

namespace {

// Returns the id of the implementation that dispatch would choose for a BF16 softmax under the
// current policy.
std::string server() {
  te_fl::CallProfile profile;
  profile.dtypes = {te_fl::DType::kBF16};
  const auto r = te_fl::OpManager::instance().explain(te_fl::op::scaled_softmax_forward, profile);
  return r.ok() ? r->impl_id + "   (" + r->policy + ")" : r.status().to_string();
}

}  // namespace

int main() {
  std::printf("by default:          %s\n", server().c_str());
  te_fl::PolicySettings reference;
  reference.prefer = te_fl::Kind::kReference;
  te_fl::CapturedPolicy captured;
  {
    te_fl::PolicyScope scope(reference);
    std::printf("in a scope:          %s\n", server().c_str());
    captured = te_fl::CapturedPolicy::capture();
  }
  std::printf("after the scope:     %s\n", server().c_str());
  std::thread([&] {
    const auto scope = captured.enter();
    std::printf("on another thread:   %s\n", server().c_str());
  }).join();
  te_fl::PolicySettings strict;
  strict.strict = true;
  te_fl::set_global_policy(te_fl::SelectionPolicy::intern(strict));
  std::printf("globally strict:     %s\n", server().c_str());
  te_fl::clear_global_policy();
  return 0;
}
