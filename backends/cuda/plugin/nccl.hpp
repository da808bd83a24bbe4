// Access to NCCL 2, which is opened on first use: a copy that the process has already loaded, else
// the one found by soname, else the one in the CUDA toolkit's folder. Its types are declared here
// as NCCL's ABI defines them, so its headers are not needed. Only communication between GPUs needs
// NCCL.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace te_fl::cuda {

// Version numbers are 10000 major + 100 minor + patch. NCCL sums BF16, the dtype of gradients,
// since 2.10.
constexpr int kNcclMinimum = 21000;

struct NcclUniqueId {  // passed to NCCL by value
  char internal[128];
};

// Statuses that NCCL's functions return.
enum NcclStatus {
  kNcclSuccess = 0,
  kNcclCudaError = 1,
  kNcclSystemError = 2,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7  // returned for a non-blocking communicator
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

// The NCCL functions that collectives need. Either all are found or the library is refused, except
// functions of newer versions, which are NULL if missing. Statuses, data types and reductions are
// ints; a communicator is a pointer.
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
  // Since 2.18. `config` NULL: that of the parent.
  int (*split)(void* communicator, int color, int key, void** out, void* config) = nullptr;
  const char* (*last_error)(void* communicator) = nullptr;  // available since 2.13
  // Since 2.28: stops the communicator's work, so that it can be destroyed. flags: 0.
  int (*revoke)(void* communicator, int flags) = nullptr;
  int number = 0;            // result of version(), queried once
  std::string version_text;  // for example "2.28.9"
  std::string path;          // path of the loaded copy
  // A text that must be equal on all ranks: NCCL's version, and the environment variables that
  // change the order of summation if one rank sets them, such as "2.28.9 (NCCL_NVLS_ENABLE=0)". The
  // environment is read once, when the library is opened, so the text does not change while
  // communicators exist.
  std::string compared_text;
  bool switches_are_out = false;  // the variables disable sums in NVLink switches (NVLS)
};

// Returns the loaded library, or NULL if the library or a required function was not found or the
// version is too old. nccl_missing() then returns the reason and the remedy. Thread-safe.
const Nccl* nccl() noexcept;
const char* nccl_missing() noexcept;

}  // namespace te_fl::cuda
