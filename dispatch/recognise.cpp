// Checks a call's arguments with the help of the thread's memo of earlier calls.
#include "core/op/call_memo.hpp"
#include "dispatch/call.hpp"

namespace te_fl::dispatch {

bool recognise(Call& call) noexcept {
  const core::CompiledOp& op = *call.row.compiled;
  const core::CallLayout& layout = op.layout();
  uint64_t hash = 0;
  auto* slot = call.thread.calls.find(layout, call.args, hash);
  if (slot == nullptr) [[unlikely]] {
    if (!op.check(call.args, call.signature)) return false;
    slot = call.thread.calls.put(layout, call.args, hash, call.signature);
    if (slot == nullptr) return true;
  }
  call.signature = slot->signature;
  call.known = &slot->known;
  call.known_number = slot->known.filled;
  return true;
}

}  // namespace te_fl::dispatch
