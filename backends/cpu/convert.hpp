// Elements to FP32 and back, chunk by chunk: the way in and out of every kernel of this backend.
//
// Kernels work on FP32 buffers that stay in the first-level cache. A buffer has room for its length
// rounded up to kPad elements, so that kernels run over whole vectors; load_f32 clears the padding.
#pragma once

#include <cstdint>

namespace te_fl::cpu {

inline constexpr int64_t kPad = 16;      // lanes of the widest vector used
inline constexpr int64_t kChunk = 1024;  // elements of a buffer, a multiple of kPad

constexpr int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// A buffer of one chunk, for the stack.
struct alignas(64) Chunk {
  float data[kChunk];
};

// dtype is a te_fl_dtype_index: F32, F16, BF16, or FP8 codes. dst is padded.
void load_f32(int dtype, const void* src, int64_t n, float* dst);
// Rounded once. src need not be padded. With `stream` past the caches, for outputs that exceed
// them; the thread must call store_fence() before others may read the output.
void store_f32(int dtype, const float* src, int64_t n, void* dst, bool stream = false);
// FP8 codes of src * scale; returns the largest |src| (NaN left out). `stream` as above.
float quantize_f32(int dtype, const float* src, int64_t n, float scale, void* dst,
                   bool stream = false);
void store_fence();
// True if an output of so many bytes should be streamed: it is larger than the last-level cache.
bool exceeds_cache(int64_t bytes);

// Padded buffers: x *= factor; acc += x.
void scale_f32(float* x, int64_t n, float factor);
void add_f32(const float* x, int64_t n, float* acc);

// Largest |src|, NaN left out.
float amax_f32(const float* src, int64_t n);
float amax_of(int dtype, const void* src, int64_t n);

// sums[i] += src[i].
void add_to_sums(const float* src, int64_t n, double* sums);

// BF16 bit patterns from FP8 codes; exact.
void fp8_to_bf16(int dtype, const void* src, int64_t n, uint16_t* dst);

// dst[c * dst_stride + r] = src[r * src_stride + c] for bytes. `stream` as in store_f32.
void transpose_bytes(const uint8_t* src, int64_t src_stride, int64_t rows, int64_t cols,
                     uint8_t* dst, int64_t dst_stride, bool stream = false);

// Start of element `index` of an array of a dtype of whole bytes.
inline const char* element(const void* base, int64_t index, int64_t bytes) {
  return static_cast<const char*>(base) + index * bytes;
}
inline char* element(void* base, int64_t index, int64_t bytes) {
  return static_cast<char*>(base) + index * bytes;
}

}  // namespace te_fl::cpu
