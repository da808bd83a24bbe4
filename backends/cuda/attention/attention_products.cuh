// Warpgroup products (wgmma) for attention on Hopper's tensor cores: 64 rows by 64 or 128 columns,
// depth 16, BF16 or F16 operands, FP32 sums. Element [4 j + 2 i + e] of a thread's sums is in row
// lane / 4 + 8 i of its warp's 16 rows and in column 8 j + 2 (lane % 4) + e.
//
// An operand A in registers is four pairs of elements per thread. The first two pairs are rows lane
// / 4 and lane / 4 + 8 of columns 2 (lane % 4) + {0, 1}; the last two are the same rows, 8 columns
// to the right. So the sums of 16 columns, rounded to 16 bits, can be used directly as operand A of
// the next wgmma.
#pragma once

#include "common/element.cuh"
#include "common/hopper.cuh"

namespace te_fl::cuda::hopper {

#define TE_FL_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TE_FL_SUMS16(i) TE_FL_SUMS4(i), TE_FL_SUMS4(i + 4), TE_FL_SUMS4(i + 8), TE_FL_SUMS4(i + 12)
#define TE_FL_NAMES32                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, " \
  "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define TE_FL_NAMES64                                              \
  TE_FL_NAMES32                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "   \
  "%56, %57, %58, %59, %60, %61, %62, %63"

// multiply_shared: d (+)= A B^T, both operands in shared memory, K contiguous. multiply_held: A in
// registers. add_across: d += A B, A in registers, B in shared memory with its rows along K.
#define TE_FL_PRODUCTS(Type, kTypes)                                                              \
  __device__ inline void multiply_shared(Type, float(&d)[32], uint64_t a, uint64_t b, bool add) { \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." kTypes " {" TE_FL_NAMES32                   \
        "}, %32, %33, p, 1, 1, 0, 0;\n}\n"                                                        \
        : TE_FL_SUMS16(0), TE_FL_SUMS16(16)                                                       \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                            \
  }                                                                                               \
  __device__ inline void multiply_held(Type, float(&d)[32], const uint32_t(&a)[4], uint64_t b,    \
                                       bool add) {                                                \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." kTypes " {" TE_FL_NAMES32                   \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"                                          \
        : TE_FL_SUMS16(0), TE_FL_SUMS16(16)                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));        \
  }                                                                                               \
  __device__ inline void add_across(Type, float(&d)[32], const uint32_t(&a)[4], uint64_t b) {     \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                                \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." kTypes " {" TE_FL_NAMES32                   \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"                                          \
        : TE_FL_SUMS16(0), TE_FL_SUMS16(16)                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                    \
  }                                                                                               \
  __device__ inline void add_across(Type, float(&d)[64], const uint32_t(&a)[4], uint64_t b) {     \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"                                                \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." kTypes " {" TE_FL_NAMES64                  \
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"                                          \
        : TE_FL_SUMS16(0), TE_FL_SUMS16(16), TE_FL_SUMS16(32), TE_FL_SUMS16(48)                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                    \
  }
TE_FL_PRODUCTS(bf16, "bf16.bf16")
TE_FL_PRODUCTS(fp16, "f16.f16")
#undef TE_FL_PRODUCTS
#undef TE_FL_NAMES64
#undef TE_FL_NAMES32
#undef TE_FL_SUMS16
#undef TE_FL_SUMS4

template <class T>
__device__ inline uint32_t pack(float low, float high);
template <>
__device__ inline uint32_t pack<bf16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
template <>
__device__ inline uint32_t pack<fp16>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}
template <class T>
__device__ inline float2 unpack(uint32_t both);
template <>
__device__ inline float2 unpack<bf16>(uint32_t both) {
  return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xFFFF0000u));
}
template <>
__device__ inline float2 unpack<fp16>(uint32_t both) {
  return __half22float2(reinterpret_cast<const __half2&>(both));
}

// ---- asynchronous copies of 16 bytes by threads

// Copies the first `bytes` (0 to 16) bytes of a 16-byte vector to shared memory; the remaining
// bytes become zeros.
__device__ inline void copy_async(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
// Copies 4 bytes if `there`, else stores zeros.
__device__ inline void copy_word_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0)
               : "memory");
}
// Arrives at an mbarrier when all earlier copies of this thread are complete. Threads that wait on
// the mbarrier must execute fence_for_copies() before their wgmma instructions read the data.
__device__ inline void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace te_fl::cuda::hopper
