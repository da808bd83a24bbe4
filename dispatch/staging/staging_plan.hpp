#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "core/op/op_table.hpp"
#include "te_fl/device.hpp"
#include "te_fl/plugin.h"
#include "te_fl/status.hpp"

// Plans the memory copies between a device and the host that let a host implementation run a call
// on the device's tensors. Uses only the op's description: the arguments, their roles, and the
// roles of the arrays of quantised tensors.
namespace te_fl::dispatch {

// One copy between the device and the buffer.
struct StagedCopy {
  char* device = nullptr;
  size_t offset = 0;  // offset in the buffer
  size_t bytes = 0;
  bool on_host = false;  // kAll: `device` points to host memory
};

// The copies for one call, and the arguments that the host implementation sees. Parts that overlap
// in device memory overlap in the same way in the buffer, so aliasing is preserved. Copied in: all
// memory that the op reads. Copied out: the elements of outputs, never the gaps between them. Host
// memory and host-only arguments are used in place, except with Scope::kAll.
class StagingPlan {
 public:
  // kAll: also copies host memory and the saved record, so that a run on the copies does not affect
  // the caller's memory. Used to compare implementations and to save a call.
  enum class Scope { kDevice, kAll };
  // The maximal number of separate memory ranges that one call may write back.
  static constexpr int64_t kMaxPieces = int64_t{1} << 20;

  StagingPlan() = default;
  StagingPlan(const StagingPlan&) = delete;
  StagingPlan& operator=(const StagingPlan&) = delete;

  // Makes the plan for arguments that have passed the op's check. Reads only the argument structs.
  // These and their tensors must outlive the plan. UNSUPPORTED with the reason if the call cannot
  // be staged.
  Status make(const core::CompiledOp& op, const void* args, const Device& device,
              const te_fl_rng& rng, Scope scope = Scope::kDevice);
  size_t buffer_bytes() const noexcept { return buffer_bytes_; }
  const std::vector<StagedCopy>& in() const noexcept { return in_; }
  const std::vector<StagedCopy>& out() const noexcept { return out_; }
  // The number of bytes copied in both directions.
  uint64_t bytes() const noexcept { return bytes_; }
  // Points args() to a buffer of buffer_bytes(), which must be aligned to 256 bytes. May be called
  // repeatedly.
  void bind(void* base) noexcept;
  const void* args() const noexcept { return args_.data(); }
  const te_fl_rng& rng() const noexcept { return rng_; }
  // kAll: the copy of the saved record; null if the call has none.
  const te_fl_saved* record() const noexcept {
    return caller_record_ == nullptr ? nullptr : &record_;
  }
  // Copies what the implementation wrote into the saved record to the caller's record.
  void hand_out_record() noexcept;

 private:
  // A memory range that the implementation sees at another address; `slot` holds that address.
  struct Part {
    uintptr_t begin = 0;
    size_t bytes = 0;
    bool in = false;
    bool out = false;
    bool on_host = false;
    void* slot = nullptr;  // address of a pointer member of args() or of a tensor below
    ptrdiff_t delta = 0;   // offset of the pointer from `begin`
    size_t extent = 0;
    std::vector<int64_t> steps, counts;  // runs of a strided output: strides in bytes, extents
    size_t run_bytes = 0;                // bytes of one run; 0: no gaps
  };
  // The union of overlapping parts.
  struct Extent {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    size_t offset = 0;
    bool on_host = false;
  };
  struct MemoryRange {
    uintptr_t begin;
    size_t bytes;
    size_t extent;
  };
  struct Shadow {
    te_fl_tensor tensor;
    te_fl_quant quant;
  };

  const te_fl_tensor* stage(uint32_t index, const te_fl_tensor& t);
  void stage_data(const te_fl_tensor& t, Shadow& shadow, bool in, bool out);
  void stage_parts(const te_fl_arg_desc& arg, Shadow& shadow, bool in);
  void stage_record(uint32_t index);
  void add(const void* memory, size_t bytes, bool in, bool out, void* slot, ptrdiff_t delta = 0);
  bool stays(const te_fl_tensor& t, bool host_only);
  void split(Part& part, const te_fl_tensor& t, int64_t width);
  void merge();
  void order_copies();
  std::vector<StagedCopy> joined(std::vector<MemoryRange> pieces) const;
  void put(uint32_t offset, const void* pointer) noexcept;

  const core::CompiledOp* op_ = nullptr;
  const void* caller_ = nullptr;  // the caller's arguments
  Device device_;
  Scope scope_ = Scope::kDevice;
  bool on_host_ = false;  // true while a tensor in host memory is added
  std::vector<uint64_t> args_;
  std::deque<Shadow> tensors_;
  std::deque<std::vector<const te_fl_tensor*>> lists_;
  std::deque<std::vector<int64_t>> integers_;
  te_fl_saved record_{};
  te_fl_saved* caller_record_ = nullptr;
  bool reads_record_ = false;  // the record is an input of the op
  te_fl_rng rng_{};
  std::vector<Part> parts_;
  std::vector<void*> empty_;  // slots of empty parts, which must not be null
  std::vector<Extent> extents_;
  std::vector<StagedCopy> in_, out_;
  size_t buffer_bytes_ = 0;
  uint64_t bytes_ = 0;
  int64_t range_count_ = 0;
  std::string problem_;
};

}  // namespace te_fl::dispatch
