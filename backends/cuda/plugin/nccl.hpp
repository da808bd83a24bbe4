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

// The functions that a group of GPUs needs to share gradients and parameters. Found together or not
// at all. Statuses (0: good), data types and reductions are ints, a communicator is a pointer.
struct Nccl {
  int (*version)(int* number) = nullptr;
  const char* (*error_text)(int status) = nullptr;
  int (*unique_id)(NcclUniqueId*) = nullptr;
  int (*create)(void** communicator, int ranks, NcclUniqueId, int rank) = nullptr;
  int (*destroy)(void* communicator) = nullptr;
  int (*all_reduce)(const void* send, void* receive, size_t count, int type, int reduction,
                    void* communicator, cudaStream_t) = nullptr;
  int (*reduce_scatter)(const void* send, void* receive, size_t receive_count, int type,
                        int reduction, void* communicator, cudaStream_t) = nullptr;
  int (*all_gather)(const void* send, void* receive, size_t send_count, int type,
                    void* communicator, cudaStream_t) = nullptr;
  int number = 0;    // version(), asked once
  std::string path;  // of the copy in use
};

// NULL if the library or one of the functions was not found, or it is too old; nccl_missing() says
// which, with the remedy. Thread-safe.
const Nccl* nccl() noexcept;
const char* nccl_missing() noexcept;

}  // namespace te_fl::cuda
