// CLBlast, opened when it is first needed: a copy that the process holds already, else by soname.
#pragma once

#include <cstdint>

#include "families.hpp"

namespace te_fl::opencl {

// The path of the library; NULL if it or one of its functions was not, and clblast_missing()
// says what. Thread-safe.
const char* clblast_path() noexcept;
const char* clblast_missing() noexcept;

// True if a buffer over the device's shared virtual memory is that memory and no copy of it.
bool buffers_share_memory(const Device& device) noexcept;

// D = alpha op(A) op(B) + beta D in F32, row-major and compact, in the device's memory; enqueued on
// the call's stream. Extents are at least 1.
struct Product {
  const void *a, *b;
  void* d;
  bool trans_a, trans_b;
  int64_t m, n, k;
  float alpha, beta;
};
void clblast_sgemm(const DeviceCall& call, const Product& p);

// Lets go of the programs that the library keeps for contexts; nothing if it was not opened.
void clblast_forget() noexcept;

}  // namespace te_fl::opencl
