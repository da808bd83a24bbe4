#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "core/op/op_table.hpp"
#include "dispatch/watch/call_copy.hpp"
#include "te_fl/device.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

// A call in a file: its op, every argument, the layout of all its memory and, in a saved case, the
// bytes before and after. For any op, read from its description.
//
//   "te-fl call 1\n", the length of the description (u64, little-endian), the description (JSON),
//   the bytes before the call, the bytes after it; each as long as the description says.
//
// Pointers are offsets into those bytes, so overlapping arguments overlap again.
namespace te_fl::dispatch {

// The maker of a saved case.
struct CallOrigin {
  std::string impl_id, owner, build_id, device, chip, driver, note;
};

// The arguments of a copied call, its pointers as offsets from `base`: what args() of the plan is
// bound to.
nlohmann::json describe_call(const core::CompiledOp& op, const StagingPlan& plan, const char* base,
                             const Device& device, bool deterministic);

// Writes a file whole, or leaves none. Error: FAILED_PRECONDITION, with the reason of the system.
Status write_call_file(const std::string& path, const nlohmann::json& description,
                       const CopyBuffer& before, const CopyBuffer& after);

// A call made from its description.
class FiledCall {
 public:
  // Checks the description against the op as it is known here. DATA_LOSS or INVALID_ARGUMENT
  // otherwise; NOT_FOUND: no such op.
  static Result<std::unique_ptr<FiledCall>> read(const std::string& path);
  static Result<std::unique_ptr<FiledCall>> make(const nlohmann::json& description,
                                                 const std::string& where);
  FiledCall(const FiledCall&) = delete;
  FiledCall& operator=(const FiledCall&) = delete;

  const std::string& op() const noexcept { return op_; }
  const CallOrigin& origin() const noexcept { return origin_; }
  const Device& device() const noexcept { return device_; }
  bool deterministic() const noexcept { return deterministic_; }
  const te_fl_rng& rng() const noexcept { return rng_; }
  size_t bytes() const noexcept { return bytes_; }
  // The bytes that a file has; empty if the call was made from a description alone.
  const CopyBuffer& before() const noexcept { return before_; }
  const CopyBuffer& after() const noexcept { return after_; }
  // Bytes to run it on: those of the file, or numbers like a run's.
  CopyBuffer made_up() const;
  // Points all arguments into memory of `device` at `base`, host-only ones into host memory at
  // `host_base`; both of bytes() and aligned to 256.
  const void* bind(char* base, const Device& device, char* host_base) noexcept;

 private:
  FiledCall() = default;
  struct Slot {  // a pointer, and what it is to point to
    void* at;
    int64_t offset;
    bool host;
  };
  struct Held {
    te_fl_tensor tensor;
    te_fl_quant quant;
    std::vector<int64_t> shape, strides;
    std::vector<int64_t> values;  // of a recorded integer tensor
    int64_t first = -1, bytes = 0;
    bool host = false;
  };
  Status fill(const nlohmann::json& description);
  const te_fl_tensor* tensor(const nlohmann::json& from);
  void slot(void* at, const nlohmann::json& offset, size_t bytes, bool host);
  void put(uint32_t offset, const void* value, size_t bytes) noexcept;

  std::string op_;
  CallOrigin origin_;
  Device device_;
  bool deterministic_ = false;
  te_fl_rng rng_{};
  size_t bytes_ = 0;
  std::vector<uint64_t> args_;
  std::deque<Held> tensors_;
  std::deque<std::vector<const te_fl_tensor*>> lists_;
  std::deque<std::vector<int64_t>> integers_;
  te_fl_saved record_{};
  std::vector<Slot> slots_;
  CopyBuffer before_, after_;
};

}  // namespace te_fl::dispatch
