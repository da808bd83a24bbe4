// Access to CLBlast, which is opened on first use: a copy that the process has already loaded, else
// by soname.
#pragma once

#include <cstdint>

#include "families.hpp"

namespace te_fl::opencl {

// Returns the path of the loaded library; NULL if the library or one of its functions was not
// found, and then clblast_missing() returns the reason. Thread-safe.
const char* clblast_path() noexcept;
const char* clblast_missing() noexcept;

// True if a cl_mem over the device's shared virtual memory uses that memory directly instead of a
// copy.
bool buffers_share_memory(const Device& device) noexcept;

// D = alpha op(A) op(B) + beta D in F32. The matrices are row-major, compact, and in device memory.
// Enqueued on the call's stream. Extents must be at least 1.
struct Product {
  const void *a, *b;
  void* d;
  bool trans_a, trans_b;
  int64_t m, n, k;
  float alpha, beta;
};
void clblast_sgemm(const DeviceCall& call, const Product& p);

// Releases the programs that CLBlast caches for contexts. Does nothing if it was not opened.
void clblast_forget() noexcept;

}  // namespace te_fl::opencl
