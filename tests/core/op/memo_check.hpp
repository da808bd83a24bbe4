#pragma once

#include "core/op/call_memo.hpp"
#include "core/op/op_table.hpp"

// Checks a call with a memo, as dispatch does.
namespace te_fl::core {

struct TestKnown {
  uint64_t filled = 0;
  bool has_plan = false;
  void forget_plan() { has_plan = false; }
  void forget_answer() {}
};
using TestMemo = CallMemo<TestKnown>;

inline bool check_by(TestMemo& memo, const CompiledOp& op, const void* args, Signature& out,
                     bool* known = nullptr) {
  uint64_t hash = 0;
  const TestMemo::Slot* slot = memo.find(op.layout(), args, hash);
  if (known != nullptr) *known = slot != nullptr;
  if (slot != nullptr) {
    out = slot->signature;
    return true;
  }
  if (!op.check(args, out)) return false;
  memo.put(op.layout(), args, hash, out);
  return true;
}

}  // namespace te_fl::core
