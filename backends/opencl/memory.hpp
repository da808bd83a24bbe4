// Device memory (coarse-grained SVM) and pinned host memory of one device.
#pragma once

#include <CL/cl.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace te_fl::opencl {

// Thread-safe. A block that is freed on a stream is reused on the same stream. Streams are in
// order, so earlier work has finished with the block by then.
class Memory {
 public:
  // default_queue: the queue of a NULL stream; must outlive this object.
  Memory(cl_context context, cl_device_id device, cl_command_queue default_queue,
         size_t cache_limit);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // 256-byte aligned. Throws backend::Error.
  void* allocate(size_t bytes, cl_command_queue queue);
  void free(void* data, cl_command_queue queue);
  // Frees the blocks cached for a queue. Called when the queue's work is finished, before it is
  // released.
  void forget(cl_command_queue queue);

  void* allocate_pinned(size_t bytes);
  void free_pinned(void* data);
  bool is_pinned(const void* data) const;

  // Returns an empty string if the bytes are in one block of this device; otherwise an error text
  // that describes the memory.
  std::string not_ours(const void* data, size_t bytes) const;
  size_t allocated() const;

 private:
  struct Block {
    void* base;  // as returned by clSVMAlloc; the block starts at the next multiple of 256
    size_t bytes;
  };
  struct Pinned {
    cl_mem buffer;
    size_t bytes;
  };
  void trim();

  const cl_context context_;
  const cl_device_id device_;
  const cl_command_queue default_queue_;
  const size_t cache_limit_;
  mutable std::mutex mutex_;
  std::map<char*, Block> blocks_;  // the blocks in use
  std::map<std::pair<cl_command_queue, size_t>, std::vector<std::pair<char*, Block>>> cache_;
  size_t cached_ = 0, allocated_ = 0;
  std::map<char*, Pinned> pinned_;
};

}  // namespace te_fl::opencl
