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

// A call stored in a file: its op, every argument, the layout of its memory and, for a saved case,
// the memory contents before and after the call. Works for every op, based on its description.
//
// Format: "te-fl call 1\n"; the length of the description (u64, little-endian); the description
// (JSON); the memory before the call; the memory after it. The description gives the length of both
// memory sections.
//
// Pointers are stored as offsets into a memory section, so overlapping arguments overlap again when
// the call is read.
namespace te_fl::dispatch {

// Information about where a saved case was recorded.
struct CallOrigin {
  std::string impl_id, owner, build_id, device, chip, driver, note;
};

// Describes the arguments of a copied call as JSON. Pointers become offsets from `base`, the
// address to which plan.bind() was called.
nlohmann::json describe_call(const core::CompiledOp& op, const StagingPlan& plan, const char* base,
                             const Device& device, bool deterministic);

// Writes the file completely or not at all. Error: FAILED_PRECONDITION with the system's error
// text.
Status write_call_file(const std::string& path, const nlohmann::json& description,
                       const CopyBuffer& before, const CopyBuffer& after);

// A call that was constructed from its description.
class FiledCall {
 public:
  // Constructs the call and checks it against this te-fl's description of the op. Errors: DATA_LOSS
  // or INVALID_ARGUMENT; NOT_FOUND: no such op.
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
  // The stored memory contents; empty if the call was made from a description alone.
  const CopyBuffer& before() const noexcept { return before_; }
  const CopyBuffer& after() const noexcept { return after_; }
  // Returns input data for a run: the stored bytes, or sample data in the value range of real calls
  // if none are stored.
  CopyBuffer made_up() const;
  // Points all arguments to memory of `device` at `base`, and host-only arguments to host memory at
  // `host_base`. Both memories must have bytes() bytes and an alignment of 256.
  const void* bind(char* base, const Device& device, char* host_base) noexcept;

 private:
  FiledCall() = default;
  struct Slot {  // a pointer variable and its target
    void* at;
    int64_t offset;
    bool host;
  };
  struct Held {
    te_fl_tensor tensor;
    te_fl_quant quant;
    std::vector<int64_t> shape, strides;
    std::vector<int64_t> values;  // contents of a recorded integer tensor
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
