#include "dispatch/staging/staged_call.hpp"

#include <chrono>
#include <memory>
#include <string>

#include "core/device/in_flight.hpp"
#include "dispatch/manager_impl.hpp"
#include "te_fl/log.hpp"

namespace te_fl::dispatch {
namespace {

using Clock = std::chrono::steady_clock;

int64_t nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

// A size as text: in bytes below 10 KiB, in KiB below 10 MiB, otherwise in MiB.
std::string bytes_text(uint64_t bytes) {
  if (bytes < uint64_t{10} << 10) return std::to_string(bytes) + " bytes";
  if (bytes < uint64_t{10} << 20) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes >> 20) + " MiB";
}

}  // namespace

StagedCall::~StagedCall() {
  if (!copying_) return;
  // The buffer returns to the pool, so no copy may still be writing to it.
  try {
    const auto kept = std::make_shared<StagingPool::Block>(std::move(buffer_));
    (void)core::wait_for_copies(call_.signature.device, call_.options.stream, kept);
  } catch (...) {  // no memory to track it: the buffer is freed, not pooled
  }
}

te_fl_status StagedCall::refused(const Status& status) {
  errors_.sink()->write(errors_.sink()->host,
                        status.wrap("it would run on copies in host memory").to_string().c_str());
  return status.to_c();
}

// The status for failed allocations and memory copies. These failures never cause a fallback,
// whatever code the device returned: results may be partly written, and the same allocation may
// have succeeded on another rank.
te_fl_status StagedCall::failed(const Status& status, const char* doing) {
  errors_.sink()->write(errors_.sink()->host, status.wrap(doing).to_string().c_str());
  const te_fl_status code = TE_FL_STATUS_CODE(status.to_c());
  return code == TE_FL_UNSUPPORTED ? static_cast<te_fl_status>(TE_FL_INTERNAL) : code;
}

te_fl_status StagedCall::plan() {
  const Status planned =
      plan_.make(*call_.row.compiled, call_.args, call_.signature.device, call_.options.rng);
  if (!planned.ok()) return refused(planned);
  const auto& cap = policy::settings_of(call_.policy).max_staged_bytes;
  if (!cap || plan_.bytes() <= *cap) return TE_FL_OK;
  const Status over(
      StatusCode::kUnsupported,
      "copying the call to the host and back moves " + std::to_string(plan_.bytes()) +
          " bytes, more than the " + std::to_string(*cap) +
          " of TE_FL_MAX_STAGED_BYTES; raise that, or load a plugin that supports the "
          "op on " +
          to_string(call_.signature.device));
  return refused(over);
}

te_fl_status StagedCall::acquire() {
  Result<StagingPool::Block> block =
      call_.manager.staging.acquire(call_.signature.device, plan_.buffer_bytes());
  if (!block.ok()) return failed(block.status(), "it would run on copies in host memory");
  buffer_ = std::move(block).value();
  plan_.bind(buffer_.data());
  return TE_FL_OK;
}

void StagedCall::bind_nowhere() noexcept {
  plan_.bind(reinterpret_cast<void*>(uintptr_t{1} << 20));
}

te_fl_context StagedCall::context(bool deterministic) const {
  te_fl_context context = context_of(call_, deterministic, errors_.sink());
  context.device = Device{}.to_c();
  context.provider = 0;
  context.stream = nullptr;
  context.rng = &plan_.rng();
  return context;
}

te_fl_status StagedCall::copy_in() {
  const auto asked = Clock::now();
  const Device& device = call_.signature.device;
  // Waits for earlier work of the stream separately, so that the time of the copies is measured
  // alone.
  const Status idle = devices::synchronize(device, call_.options.stream);
  if (!idle.ok()) return failed(idle, "the call's tensors could not be copied to the host");
  waiting_ = nanoseconds_since(asked);
  if (plan_.in().empty()) return TE_FL_OK;
  const auto start = Clock::now();
  char* const base = static_cast<char*>(buffer_.data());
  copying_ = true;
  for (const StagedCopy& c : plan_.in()) {
    const Status copied =
        devices::copy(Device{}, base + c.offset, device, c.device, c.bytes, call_.options.stream);
    if (!copied.ok()) return failed(copied, "the call's tensors could not be copied to the host");
  }
  const Status done = devices::synchronize(device, call_.options.stream);
  if (!done.ok()) return failed(done, "the call's tensors could not be copied to the host");
  copying_ = false;
  copies_ += nanoseconds_since(start);
  return TE_FL_OK;
}

te_fl_status StagedCall::copy_out() {
  const auto start = Clock::now();
  const Device& device = call_.signature.device;
  const char* const base = static_cast<const char*>(buffer_.data());
  copying_ = true;
  for (const StagedCopy& c : plan_.out()) {
    const Status copied =
        devices::copy(device, c.device, Device{}, base + c.offset, c.bytes, call_.options.stream);
    if (!copied.ok()) return failed(copied, "the results could not be copied from the host");
  }
  const Status done = devices::synchronize(device, call_.options.stream);
  if (!done.ok()) return failed(done, "the results could not be copied from the host");
  copying_ = false;
  plan_.hand_out_record();
  copies_ += nanoseconds_since(start);
  return TE_FL_OK;
}

void StagedCall::count(const Implementation& impl) const {
  impl.staged.calls.fetch_add(1, std::memory_order_relaxed);
  impl.staged.bytes.fetch_add(plan_.bytes(), std::memory_order_relaxed);
  impl.staged.copying.fetch_add(static_cast<uint64_t>(copies_), std::memory_order_relaxed);
  impl.staged.waiting.fetch_add(static_cast<uint64_t>(waiting_), std::memory_order_relaxed);
  if (plan_.bytes() == 0) return;  // a query op, or tensors without elements
  if (impl.staged.logged.exchange(true, std::memory_order_relaxed)) return;
  log::once(log::Level::kWarning, "staged " + impl.op,
            "op '" + impl.op + "' on " + to_string(call_.signature.device) + " is run by '" +
                impl.impl_id + "' on copies in host memory, this call " +
                bytes_text(plan_.bytes()) + " (" + std::to_string(plan_.in().size()) +
                " copies in, " + std::to_string(plan_.out().size()) +
                " out); OpManager::usage() counts it, TE_FL_STRICT=1 refuses it unless the policy "
                "names it");
}

}  // namespace te_fl::dispatch
