// NCCL 2, opened when it is first needed: a copy that the process holds already, else by soname,
// else in the CUDA toolkit's folder. Its types are stated here as the library's binary interface
// has them, so no header of it is needed. Nothing but communication between GPUs needs it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace te_fl::cuda {

// Versions are 10000 major + 100 minor + patch. Sums of BF16 came with 2.10, and gradients are
// BF16.
constexpr int kNcclMinimum = 21000;

struct NcclUniqueId {  // passed by value
  char internal[128];
};

// The functions return these.
enum NcclStatus {
  kNcclSuccess = 0,
  kNcclCudaError = 1,
  kNcclSystemError = 2,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7  // of a communicator that does not block
};
enum NcclReduction { kNcclSum = 0, kNcclMax = 2, kNcclAvg = 4 };
enum NcclType {
  kNcclU8 = 1,
  kNcclI32 = 2,
  kNcclI64 = 4,
  kNcclF16 = 6,
  kNcclF32 = 7,
  kNcclF64 = 8,
  kNcclBF16 = 9
};

// The functions that collectives need. Found together or not at all, but for those that NCCL has
// had later, which are NULL where it has not. Statuses, data types and reductions are ints, a
// communicator is a pointer.
struct Nccl {
  int (*version)(int* number) = nullptr;
  const char* (*error_text)(int status) = nullptr;
  int (*unique_id)(NcclUniqueId*) = nullptr;
  int (*create)(void** communicator, int ranks, NcclUniqueId, int rank) = nullptr;
  int (*destroy)(void* communicator) = nullptr;
  int (*abort)(void* communicator) = nullptr;
  int (*async_error)(void* communicator, int* status) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send)(const void*, size_t count, int type, int peer, void* communicator,
              cudaStream_t) = nullptr;
  int (*recv)(void*, size_t count, int type, int peer, void* communicator, cudaStream_t) = nullptr;
  int (*broadcast)(const void* send, void* receive, size_t count, int type, int root,
                   void* communicator, cudaStream_t) = nullptr;
  int (*all_reduce)(const void* send, void* receive, size_t count, int type, int reduction,
                    void* communicator, cudaStream_t) = nullptr;
  int (*reduce_scatter)(const void* send, void* receive, size_t receive_count, int type,
                        int reduction, void* communicator, cudaStream_t) = nullptr;
  int (*all_gather)(const void* send, void* receive, size_t send_count, int type,
                    void* communicator, cudaStream_t) = nullptr;
  // 2.18; `config` NULL: the parent's.
  int (*split)(void* communicator, int color, int key, void** out, void* config) = nullptr;
  const char* (*last_error)(void* communicator) = nullptr;  // 2.13
  // 2.28: stops what the communicator does and leaves it to be destroyed; flags 0.
  int (*revoke)(void* communicator, int flags) = nullptr;
  int number = 0;            // version(), asked once
  std::string version_text;  // "2.28.9"
  std::string path;          // of the copy in use
  // Ranks have these alike: the version, and the variables by which a rank alone would
  // choose another order of sums, "2.28.9 (NCCL_NVLS_ENABLE=0)". The environment is read once, as
  // the library is opened, so that no rank's answer changes under a communicator.
  std::string compared_text;
  bool switches_are_out = false;  // the variables keep NVLink's switches from summing
};

// NULL if the library or one of the functions was not found, or it is too old; nccl_missing() says
// which, with the remedy. Thread-safe.
const Nccl* nccl() noexcept;
const char* nccl_missing() noexcept;

}  // namespace te_fl::cuda
