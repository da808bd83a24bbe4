#include "comm/nccl_ranks.hpp"

#include <dlfcn.h>

#include <chrono>
#include <exception>
#include <future>
#include <thread>
#include <utility>

#include "device/cuda_check.hpp"
#include "device/device.hpp"
#include "device/open_library.hpp"
#include "device/outside_capture.hpp"

namespace te_fl::cuda {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kOthersTime{2000};  // a destructor waits this long for other ranks

// Keeps this library loaded for ever, because threads that are still inside NCCL will return into
// it.
void keep_this_library() {
  const std::string path = path_of(reinterpret_cast<const void*>(&keep_this_library));
  (void)dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

constexpr const char* kDoesNotBlock =
    "NCCL_COMM_BLOCKING=0 requests communicators that do not block, which start a thread in every "
    "collective and are not supported; unset it, also in nccl.conf";

const char* remedy_for(int status) {
  switch (status) {
    case kNcclSystemError:
      return "look for a network that all ranks reach (NCCL_SOCKET_IFNAME names the interface) and "
             "for room in /dev/shm (containers: --ipc=host, or --shm-size)";
    case kNcclInvalidArgument:
    case kNcclInvalidUsage:
      return "give each rank a GPU of its own, and memory of that GPU";
    case kNcclRemoteError:
      return "look at the output of the other ranks: one has failed or is gone";
    case kNcclInProgress:
      return kDoesNotBlock;
    default:
      return "NCCL_DEBUG=WARN prints NCCL's own log";
  }
}

std::string describe_error(const Nccl& nccl, int status, const char* function, void* communicator) {
  std::string text =
      std::string(function) + " of NCCL " + nccl.version_text + ": " + nccl.error_text(status);
  if (nccl.last_error != nullptr) {
    if (const char* more = nccl.last_error(communicator); more != nullptr && *more != '\0')
      text += std::string(" (") + more + ")";
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text + "; " + remedy_for(status);
}

[[noreturn]] void throw_aborted() {
  throw backend::Error(TE_FL_COMM_FAILED, "the communicator of NCCL was aborted");
}

// Aborts and frees a failed communicator. First revokes it, so that threads inside NCCL calls
// return, and waits up to a second for these threads.
void end_by_abort(NcclLife& life) {
  void* handle = life.handle.exchange(nullptr);
  if (handle == nullptr) return;
  if (life.calls.load() != 0 && life.nccl->revoke != nullptr) {
    (void)life.nccl->revoke(handle, 0);
    for (int i = 0; i < 1000 && life.calls.load(std::memory_order_acquire) != 0; ++i)
      std::this_thread::sleep_for(milliseconds(1));
  }
  (void)life.nccl->abort(handle);
}

void end_by_destroy(NcclLife& life) { (void)life.nccl->destroy(life.handle.exchange(nullptr)); }

void make_aside(NcclLife& life, const char* function, const std::function<int(void**)>& make) {
  void* handle = nullptr;
  const bool current = cudaSetDevice(life.device) == cudaSuccess;
  int status = current ? make(&handle) : kNcclCudaError;
  std::string error;
  if (status == kNcclInProgress) {
    (void)life.nccl->abort(handle);
    status = kNcclInvalidUsage, error = kDoesNotBlock;
  } else if (status != kNcclSuccess) {
    error = describe_error(*life.nccl, status, function, nullptr);
  }
  bool aborted = false;
  {
    const std::lock_guard lock(life.mutex);
    life.made = true;
    life.status = status;
    life.error = std::move(error);
    life.handle = status == kNcclSuccess ? handle : nullptr;
    aborted = life.aborted.load();
  }
  if (aborted) end_by_abort(life);
}

}  // namespace

void throw_nccl(const Nccl& nccl, int status, const char* function, void* communicator) {
  std::string text = describe_error(nccl, status, function, communicator);
  if (device_is_lost(text)) throw backend::Error(TE_FL_DEVICE_LOST, text);
  throw backend::Error(TE_FL_COMM_FAILED, text);
}

void NcclRanks::run_aside(std::function<void(NcclLife&)> work) {
  std::packaged_task<void()> task([life = life_, work = std::move(work)] {
    OutsideCapture outside;
    (void)cudaSetDevice(life->device);
    work(*life);
  });
  aside_ = task.get_future();
  std::thread(std::move(task)).detach();
}

void NcclRanks::end_aside(void (*work)(NcclLife&)) noexcept {
  try {
    run_aside(work);
  } catch (const std::exception&) {  // no thread could be made: run on this thread, which may block
    work(*life_);
    aside_ = {};  // the earlier task has ended
  }
}

NcclRanks::NcclRanks(const Nccl& nccl, const te_fl_comm_config& config, const char* function,
                     std::function<int(void**)> make)
    : timeout_ms_(config.timeout_ms), life_(std::make_shared<NcclLife>()) {
  life_->nccl = &nccl;
  life_->device = config.device.index;
  run_aside(
      [function, make = std::move(make)](NcclLife& life) { make_aside(life, function, make); });
}

NcclRanks::~NcclRanks() {
  bool ends = false;
  {
    const std::lock_guard lock(life_->mutex);
    ends = !life_->aborted.exchange(true) && life_->handle != nullptr;
  }
  if (ends) {
    end_aside([](NcclLife& life) { (void)synchronize_device(life.device, nullptr); });
    const milliseconds limit(timeout_ms_ == 0 ? UINT32_MAX : timeout_ms_);
    const bool done = !aside_.valid() || aside_.wait_for(limit) == std::future_status::ready;
    end_aside(done ? end_by_destroy : end_by_abort);
  }
  if (aside_.valid() && aside_.wait_for(kOthersTime) != std::future_status::ready)
    keep_this_library();
}

bool NcclRanks::ready() const {
  const std::lock_guard lock(life_->mutex);
  if (!life_->made) return false;
  if (life_->status == kNcclSuccess) return true;
  throw backend::Error(
      life_->status == kNcclInvalidUsage ? TE_FL_FAILED_PRECONDITION : TE_FL_COMM_FAILED,
      life_->error);
}

void NcclRanks::abort() {
  bool ends = false;
  {
    const std::lock_guard lock(life_->mutex);
    ends = !life_->aborted.exchange(true) && life_->handle != nullptr;
  }
  if (ends) end_aside(end_by_abort);
}

void NcclRanks::check() const {
  const std::lock_guard lock(life_->mutex);
  if (life_->aborted.load()) throw_aborted();
  void* handle = life_->handle.load();
  if (handle == nullptr) return;
  int status = kNcclSuccess;
  const int asked = nccl().async_error(handle, &status);
  if (asked != kNcclSuccess) status = asked;
  if (status != kNcclSuccess && status != kNcclInProgress)
    throw_nccl(nccl(), status, "ncclCommGetAsyncError", handle);
}

NcclRanks::Use::Use(const NcclRanks& ranks) : life_(ranks.life_) {
  life_->calls.fetch_add(1);  // first count, then test; abort() sets the flag first and then reads
                              // the count
  handle_ = life_->handle.load();
  if (!life_->aborted.load() && handle_ != nullptr) return;
  life_->calls.fetch_sub(1);
  throw_aborted();
}

void NcclRanks::Use::check(int status, const char* function) const {
  if (life_->aborted.load(std::memory_order_acquire)) throw_aborted();
  if (status != kNcclSuccess) throw_nccl(*life_->nccl, status, function, handle_);
}

}  // namespace te_fl::cuda
