// Warpgroup matrix multiplication (wgmma) on Hopper's tensor cores, and related instructions:
// descriptors of operands in shared memory, bulk copies (TMA), mbarriers and cluster barriers.
#pragma once

#include <cuda.h>

#include <cstdint>

// Marks a kernel whose blocks run in clusters of two. For architectures before 9.0 nvcc refuses the
// attribute, and the bodies of these kernels are empty.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TE_FL_PAIRS __cluster_dims__(2, 1, 1)
#else
#define TE_FL_PAIRS
#endif

namespace te_fl::cuda::hopper {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarriers

__device__ inline void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ inline void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the mbarrier that has the same shared memory offset in block `rank` of the cluster.
__device__ inline void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ inline void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void sync_cluster() {
  __syncwarp();  // "aligned" instructions require converged lanes
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
__device__ inline uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// ---- bulk copies (TMA)

// Reads a tensor map into the cache, so that the first copy by it need not wait for it.
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ inline void load_box(const CUtensorMap& map, uint32_t to, uint32_t barrier, int x,
                                int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
// Multicast: copies the box to the same shared memory offset in every block of the bit mask
// `blocks` (bit = rank), and signals the mbarrier of each of these blocks.
__device__ inline void load_box_to(const CUtensorMap& map, uint32_t to, uint32_t barrier, int x,
                                   int y, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

__device__ inline void store_box(const CUtensorMap& map, uint32_t from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
      "r"(from), "r"(x), "r"(y)
      : "memory");
}
// Copies `bytes` consecutive bytes. The size and both addresses must be multiples of 16.
__device__ inline void load_bytes(const void* from, uint32_t to, uint32_t barrier, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ inline void store_bytes(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last kLeft groups of bulk stores have read their source.
template <int kLeft = 0>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
__device__ inline void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Makes this thread's earlier writes to shared memory visible to later bulk copies and wgmma
// instructions (the async proxy).
__device__ inline void fence_for_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- products (wgmma)

// wgmma descriptors of matrices with rows of 128 bytes in the 128-byte swizzle. along_k(): K is
// contiguous, so a row holds consecutive k of one m or n. across_k(): a row holds 64 consecutive m
// or n of one k; the next 64 columns start `next` bytes further on.
__device__ inline uint64_t along_k(uint32_t address) {
  return (address & 0x3FFFF) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}
__device__ inline uint64_t across_k(uint32_t address, uint32_t next) {
  return (address & 0x3FFFF) >> 4 | uint64_t{next >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Waits for all wgmma groups but the last kLeft. Afterwards `sums` may be read.
template <int kLeft = 0, int kCount>
__device__ inline void wait_for_sums(float (&sums)[kCount]) {
  wait_products<kLeft>();
#pragma unroll
  for (float& s : sums) asm volatile("" : "+f"(s)::"memory");
}

// multiply(): d (+)= A[64, kstep] B[N, kstep]^T. Each thread has N / 2 sums d: 128 with N = 256, or
// 64 with N = 128.
struct E4m3 {};
struct E5m2E4m3 {};  // A is E5M2, B is E4M3
struct Bf16 {};      // both operands with K contiguous
struct Bf16AcrossB {};
struct Bf16Across {};  // neither operand has K contiguous

#define TE_FL_PRODUCT(Type, kShape, kMore)                                                        \
  __device__ inline void multiply(Type, float(&d)[128], uint64_t a, uint64_t b, bool add) {       \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n256" kShape                                             \
        " {"                                                                                      \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "                                 \
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "                       \
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, "                       \
        "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "                       \
        "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, "                       \
        "%65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "                       \
        "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, "                       \
        "%91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, "                   \
        "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "          \
        "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, p, 1, "   \
        "1" kMore ";\n}\n"                                                                        \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),           \
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),           \
          "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),           \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),           \
          "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),           \
          "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),           \
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),           \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),           \
          "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]),           \
          "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]),           \
          "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),           \
          "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]),           \
          "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),           \
          "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),           \
          "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),       \
          "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),     \
          "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),     \
          "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),     \
          "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])      \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                            \
  }
TE_FL_PRODUCT(E4m3, "k32.f32.e4m3.e4m3", "")
TE_FL_PRODUCT(Bf16, "k16.f32.bf16.bf16", ", 0, 0")
TE_FL_PRODUCT(Bf16AcrossB, "k16.f32.bf16.bf16", ", 0, 1")
TE_FL_PRODUCT(Bf16Across, "k16.f32.bf16.bf16", ", 1, 1")
#undef TE_FL_PRODUCT
#define TE_FL_PRODUCT(Type, kShape, kMore)                                                        \
  __device__ inline void multiply(Type, float(&d)[64], uint64_t a, uint64_t b, bool add) {        \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n128" kShape                                             \
        " {"                                                                                      \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "                            \
        "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "                  \
        "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "                  \
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "                  \
        "%56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1" kMore ";\n}\n"               \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),           \
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),           \
          "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),           \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),           \
          "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),           \
          "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),           \
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),           \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),           \
          "+f"(d[62]), "+f"(d[63])                                                                \
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                            \
  }
TE_FL_PRODUCT(E4m3, "k32.f32.e4m3.e4m3", "")
TE_FL_PRODUCT(E5m2E4m3, "k32.f32.e5m2.e4m3", "")
#undef TE_FL_PRODUCT

template <int kRegisters>
__device__ inline void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace te_fl::cuda::hopper
