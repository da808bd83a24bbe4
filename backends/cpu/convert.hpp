// Converts elements to FP32 and back, chunk by chunk. Every kernel of this backend loads and stores
// through these functions.
//
// Kernels work on FP32 buffers that fit in the L1 cache. A buffer must be "padded": it must have
// room for its length rounded up to a multiple of kPad elements, so that kernels can process full
// vectors. load_f32 sets the padding to 0.
#pragma once

#include <cstdint>

namespace te_fl::cpu {

inline constexpr int64_t kPad = 16;      // lanes of the widest vector used
inline constexpr int64_t kChunk = 1024;  // elements of a buffer, a multiple of kPad

constexpr int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// A buffer of one chunk, for use on the stack.
struct alignas(64) Chunk {
  float data[kChunk];
};

// Converts n elements to FP32. `dtype`: te_fl_dtype_index of F32, F16, BF16 or FP8 (whose scale is
// not applied). `dst` must be padded.
void load_f32(int dtype, const void* src, int64_t n, float* dst);
// Converts n FP32 elements to `dtype`, rounded once. `src` need not be padded. `stream`: uses
// non-temporal stores, for outputs larger than the caches; the thread must then call store_fence()
// before other threads read the output.
void store_f32(int dtype, const float* src, int64_t n, void* dst, bool stream = false);
// Writes src * scale as FP8. Returns the largest |src|, ignoring NaN. `stream`: as in store_f32().
float quantize_f32(int dtype, const float* src, int64_t n, float scale, void* dst,
                   bool stream = false);
void store_fence();
// True if an output of `bytes` bytes exceeds the last-level cache, so that non-temporal stores
// should be used.
bool exceeds_cache(int64_t bytes);

// scale_f32() computes x *= factor; add_f32() computes acc += x. The buffers must be padded.
void scale_f32(float* x, int64_t n, float factor);
void add_f32(const float* x, int64_t n, float* acc);

// Both functions return the largest |src|, ignoring NaN.
float amax_f32(const float* src, int64_t n);
float amax_of(int dtype, const void* src, int64_t n);

// sums[i] += src[i].
void add_to_sums(const float* src, int64_t n, double* sums);

// Converts FP8 codes to BF16 bit patterns. Exact.
void fp8_to_bf16(int dtype, const void* src, int64_t n, uint16_t* dst);

// Transposes a matrix of bytes: dst[c * dst_stride + r] = src[r * src_stride + c]. `stream`: as in
// store_f32().
void transpose_bytes(const uint8_t* src, int64_t src_stride, int64_t rows, int64_t cols,
                     uint8_t* dst, int64_t dst_stride, bool stream = false);

// Address of element `index` of an array whose elements have `bytes` bytes.
inline const char* element(const void* base, int64_t index, int64_t bytes) {
  return static_cast<const char*>(base) + index * bytes;
}
inline char* element(void* base, int64_t index, int64_t bytes) {
  return static_cast<char*>(base) + index * bytes;
}

}  // namespace te_fl::cpu
