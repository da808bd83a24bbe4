// The ops dequantize and fp8_transpose.
#include "quantize/dequantize.hpp"

#include "quantize/quantize.cuh"
#include "te_fl/ops/quantize.h"

namespace te_fl::cuda {
namespace {

struct Decode {
  Source codes;
  const void* scale_inv;
  uint32_t scaling;
  int64_t m, k;
  bool columnwise;  // data and scales are column-wise
  bool transposed;  // data and scales are stored for the matrix [k, m]
  __device__ const uint8_t* mxfp8_scale(int64_t row, int64_t col) const {
    const auto* codes = static_cast<const uint8_t*>(scale_inv);
    return columnwise ? codes + row / kMxfp8Block * mxfp8_column_pitch(k) + col
                      : codes + row * mxfp8_row_pitch(k) + col / kMxfp8Block;
  }
  __device__ float scale(int64_t row, int64_t col) const {
    const int64_t i = transposed ? col : row, j = transposed ? row : col;
    const int64_t rows = transposed ? k : m, cols = transposed ? m : k;
    const auto* factors = static_cast<const float*>(scale_inv);
    if (scaling == TE_FL_SCALING_TENSOR) return *factors;
    if (scaling == TE_FL_SCALING_MXFP8) return numeric::e8m0_to_float(*mxfp8_scale(row, col));
    if (scaling == TE_FL_SCALING_BLOCK_1X128) return factors[j / 128 * ((rows + 3) / 4 * 4) + i];
    return factors[i / 128 * (((cols + 127) / 128 + 3) / 4 * 4) + j / 128];
  }
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    if (!transposed) codes.load(row * k + col, n, v);
    for (int i = 0; i < kGroup; ++i) {
      if (i >= n) break;
      if (transposed) v[i] = codes.at((col + i) * m + row);
      v[i] *= scale(row, col + i);
    }
  }
};

// Dequantises kDecodeRows x kDecodeCols elements per block, four rows of eight elements per thread.
// kColumns: reads column-wise MXFP8, in which all rows of a thread share the scale of a column.
template <bool kColumns>
__global__ void __launch_bounds__(kThreads) decode_kernel(Decode in, Target out, unsigned strips) {
  const unsigned step = blockIdx.x / strips, strip = blockIdx.x - step * strips;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t col = int64_t{strip} * kDecodeCols + thread % 16 * 8;
  const int64_t row = int64_t{step} * kDecodeRows + thread / 16 * 4;
  if (col >= in.k) return;
  uint2 raw[4], column_scales{};
  float scale[4] = {};
  if constexpr (kColumns) {
    const int64_t r = row < in.m ? row : in.m - 1;
    column_scales = *reinterpret_cast<const uint2*>(in.mxfp8_scale(r, col));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t r = row + i < in.m ? row + i : in.m - 1;
    raw[i] =
        *reinterpret_cast<const uint2*>(static_cast<const char*>(in.codes.data) + r * in.k + col);
    if constexpr (!kColumns) scale[i] = in.scale(r, col);
  }
  const uint32_t scale_words[2] = {column_scales.x, column_scales.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (row + i >= in.m) return;
    float v[8];
    const uint32_t words[2] = {raw[i].x, raw[i].y};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const auto code = static_cast<uint8_t>(words[e / 4] >> (e % 4 * 8));
      const auto own = static_cast<uint8_t>(scale_words[e / 4] >> (e % 4 * 8));
      const float factor = kColumns ? numeric::e8m0_to_float(own) : scale[i];
      if (in.codes.dtype == TE_FL_F8E4M3) {
        e4m3 value;
        value.__x = code;
        v[e] = to_f32(value) * factor;
      } else {
        e5m2 value;
        value.__x = code;
        v[e] = to_f32(value) * factor;
      }
    }
    store_piece<8>(out, (row + i) * in.k + col, v);
  }
}
void launch_decode(const te_fl_context& ctx, const Decode& in, const te_fl_tensor& out) {
  const int64_t strips = ceil_div(in.k, kDecodeCols), steps = ceil_div(in.m, kDecodeRows);
  const auto kernel = in.columnwise ? decode_kernel<true> : decode_kernel<false>;
  kernel<<<static_cast<unsigned>(steps * strips), kThreads, 0, stream_of(ctx)>>>(
      in, Target(out), static_cast<unsigned>(strips));
  check_launch("decode_kernel");
}

}  // namespace

namespace {

// Reads NVFP4, of which a byte holds two codes, the first in the lower half.
struct DecodeNvfp4 {
  const uint8_t* codes;
  const uint8_t* scales;  // E4M3, `pitch` for each row of the stored matrix
  const float* amax;
  int64_t m, k, pitch;
  bool transposed;  // data and scales are stored for the matrix [k, m]
  __device__ float at(int64_t row, int64_t col) const {
    const int64_t i = transposed ? col : row, j = transposed ? row : col;
    const int64_t n = i * (transposed ? m : k) + j;
    const uint32_t code = codes[n / 2] >> (n % 2 * 4) & 0xFu, number = code & 7u;
    // 0, 0.5, 1, 1.5, 2, 3, 4, 6
    const float magnitude = number < 4   ? 0.5f * static_cast<float>(number)
                            : number < 7 ? static_cast<float>(number) - 2.0f
                                         : 6.0f;
    e4m3 scale;
    scale.__x = scales[i * pitch + j / 16];
    const float value = (code > 7u ? -magnitude : magnitude) * to_f32(scale);
    const float most = *amax;
    // The product of a code and its scale has 6 bits, so only the last operations round.
    return most > 0.0f && most <= FLT_MAX
               ? static_cast<float>(static_cast<double>(value) * static_cast<double>(most) / 2688.0)
               : value;
  }
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    for (int i = 0; i < kGroup; ++i) v[i] = i < n ? at(row, col + i) : 0.0f;
  }
};

void dequantize_nvfp4(const te_fl_context& ctx, const te_fl_dequantize_args& args) {
  const te_fl_quant& quant = *args.input->quant;
  const backend::Matrix matrix = backend::as_matrix(*args.input);
  DecodeNvfp4 decode{};
  decode.transposed = args.input->dl.data == nullptr;
  decode.codes = decode.transposed ? static_cast<const uint8_t*>(quant.columnwise_data)
                                   : backend::data<const uint8_t>(*args.input);
  decode.scales =
      static_cast<const uint8_t*>(decode.transposed ? quant.columnwise_scale_inv : quant.scale_inv);
  decode.amax =
      decode.transposed && quant.columnwise_amax != nullptr ? quant.columnwise_amax : quant.amax;
  decode.m = matrix.rows;
  decode.k = matrix.cols;
  const int64_t length = decode.transposed ? matrix.rows : matrix.cols;
  decode.pitch = ceil_div(ceil_div(length, 16), 4) * 4;
  store_output(ctx, *args.output, decode);
}

}  // namespace

void dequantize(const te_fl_context& ctx, const te_fl_dequantize_args& args) {
  if (backend::scaling(*args.input) == TE_FL_SCALING_NVFP4) return dequantize_nvfp4(ctx, args);
  const te_fl_tensor& input = *args.input;
  const te_fl_quant& quant = *input.quant;
  const backend::Matrix matrix = backend::as_matrix(input);
  const bool columnwise = input.dl.data == nullptr;
  Decode decode{};
  decode.codes = Source(input);
  if (columnwise) decode.codes.data = quant.columnwise_data;
  decode.scale_inv = columnwise && quant.columnwise_scale_inv != nullptr
                         ? quant.columnwise_scale_inv
                         : quant.scale_inv;
  decode.scaling = quant.scaling;
  decode.m = matrix.rows;
  decode.k = matrix.cols;
  decode.columnwise = columnwise;
  decode.transposed = columnwise && quant.scaling != TE_FL_SCALING_MXFP8;
  if (choose_quantize(args).whole) return launch_decode(ctx, decode, *args.output);
  store_output(ctx, *args.output, decode);
}
namespace {

Refusal refuse_dequantize(const te_fl_dequantize_args& args) {
  if (!all_dense(args.input, args.output)) return kNotContiguous;
  return overlaps(*args.output, *args.input) ? kInPlace : nullptr;
}

// ---- transposition

// The column sums that a transposition also computes. partials NULL: none.
struct ColumnSums {
  float* partials = nullptr;         // shape [steps, k]
  const float* scale_inv = nullptr;  // NULL: the scale is 1
  int64_t each = 1;                  // tiles of 128 rows per step
  __device__ float scale() const { return scale_inv != nullptr ? *scale_inv : 1.0f; }
};

template <class T>
__device__ inline float2 two_codes(uint32_t pair) {
  constexpr auto kKind = std::is_same_v<T, e5m2> ? __NV_E5M2 : __NV_E4M3;
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), kKind);
  return __half22float2(__half2(halves));
}

// Sums each column over the block's rows and stores the partial sums. `sum`: the sums of the 16
// columns that this thread has read.
__device__ inline void store_sums(float (&sum)[16], const ColumnSums& sums, int64_t col0, int64_t k,
                                  unsigned step) {
  __shared__ float shared[kWarps][128];
  const int thread = static_cast<int>(threadIdx.x), c = thread % 8;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], 8);
    sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], 16);
    if (thread % 32 < 8) shared[thread / 32][c * 16 + i] = sum[i];
  }
  __syncthreads();
  if (thread >= 128 || col0 + thread >= k) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += shared[w][thread];
  sums.partials[step * k + col0 + thread] = total * sums.scale();
}

// Transposes tiles of 128 x 128 FP8 elements with 16-byte accesses. Sizes and addresses must be
// multiples of 16. T: the FP8 type, or void if no column sums are computed.
template <class T>
__global__ void __launch_bounds__(kThreads)
    transpose_tiles_kernel(const uint8_t* in, uint8_t* out, int64_t m, int64_t k, unsigned strips,
                           ColumnSums sums) {
  constexpr bool kSums = !std::is_void_v<T>;
  __shared__ __align__(16) uint32_t columns[128][32];
  const unsigned step = blockIdx.x / strips, strip = blockIdx.x - step * strips;
  const int64_t col0 = int64_t{strip} * 128;
  const int thread = static_cast<int>(threadIdx.x), c = thread % 8, group = thread / 8;
  const int count = static_cast<int>(k - col0 < 128 ? k - col0 : 128);
  float sum[16] = {};
  const int64_t each = kSums ? sums.each : 1;
  for (int64_t t = 0; t < each; ++t) {
    const int64_t row0 = (step * each + t) * 128;
    if (row0 >= m) break;
    if (t > 0) __syncthreads();
    if (row0 + group * 4 < m && col0 + c * 16 < k) {
      const uint8_t* from = in + (row0 + group * 4) * k + col0 + c * 16;
      uint4 raw[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[i] = *reinterpret_cast<const uint4*>(from + i * k);
      const uint32_t words[4][4] = {{raw[0].x, raw[1].x, raw[2].x, raw[3].x},
                                    {raw[0].y, raw[1].y, raw[2].y, raw[3].y},
                                    {raw[0].z, raw[1].z, raw[2].z, raw[3].z},
                                    {raw[0].w, raw[1].w, raw[2].w, raw[3].w}};
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        uint32_t w[4] = {words[h][0], words[h][1], words[h][2], words[h][3]};
        if constexpr (kSums) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 low = two_codes<T>(w[i] & 0xFFFFu), high = two_codes<T>(w[i] >> 16);
            sum[h * 4] += low.x, sum[h * 4 + 1] += low.y;
            sum[h * 4 + 2] += high.x, sum[h * 4 + 3] += high.y;
          }
        }
        transpose_codes(w);
#pragma unroll
        for (int j = 0; j < 4; ++j) columns[c * 16 + h * 4 + j][code_word(group, c)] = w[j];
      }
    }
    __syncthreads();
    write_columns<1, kThreads, 128>(columns, out + col0 * m, m, row0, count);
  }
  if constexpr (kSums) store_sums(sum, sums, col0, k, step);
}

__global__ void transpose_kernel(const uint8_t* in, uint8_t* out, int64_t m, int64_t k) {
  __shared__ uint8_t tile[64][65];
  const int64_t row0 = blockIdx.y * int64_t{64} + blockIdx.z * int64_t{64} * 65535;
  const int64_t col0 = blockIdx.x * int64_t{64};
  for (int i = threadIdx.x; i < 64 * 64; i += kThreads) {
    const int r = i / 64, c = i % 64;
    if (row0 + r < m && col0 + c < k) tile[r][c] = in[(row0 + r) * k + col0 + c];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * 64; i += kThreads) {
    const int c = i / 64, r = i % 64;
    if (row0 + r < m && col0 + c < k) out[(col0 + c) * m + row0 + r] = tile[r][c];
  }
}
// A Produce functor (store.cuh) that converts FP8 to FP32, for column sums.
struct Codes {
  Source codes;
  int64_t cols;
  const float* scale_inv;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    codes.load(row * cols + col, n, v);
    if (scale_inv == nullptr) return;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] *= *scale_inv;
  }
};

void transpose_tiles(const te_fl_context& ctx, const te_fl_fp8_transpose_args& args,
                     const backend::Matrix& matrix, ColumnSums sums) {
  const auto* in = backend::data<const uint8_t>(*args.input);
  auto* out = backend::data<uint8_t>(*args.output);
  const int64_t m = matrix.rows, k = matrix.cols, strips = ceil_div(k, 128);
  const int64_t tiles = ceil_div(m, 128);
  if (sums.partials != nullptr) sums.each = ceil_div(tiles, column_parts(m));
  const int64_t steps = ceil_div(tiles, sums.each);
  const auto kernel = sums.partials == nullptr                ? transpose_tiles_kernel<void>
                      : dtype_of(*args.input) == TE_FL_F8E5M2 ? transpose_tiles_kernel<e5m2>
                                                              : transpose_tiles_kernel<e4m3>;
  kernel<<<static_cast<unsigned>(steps * strips), kThreads, 0, stream_of(ctx)>>>(
      in, out, m, k, static_cast<unsigned>(strips), sums);
  check_launch("transpose_tiles_kernel");
  if (sums.partials != nullptr) {
    add_partials(ctx, sums.partials, steps, k, *args.column_sums, false);
  }
}

void fp8_transpose(const te_fl_context& ctx, const te_fl_fp8_transpose_args& args) {
  const backend::Matrix matrix = backend::as_matrix(*args.input);
  ColumnSums sums;
  if (args.column_sums != nullptr) sums.partials = static_cast<float*>(ctx.workspace);
  if (args.scale_inv != nullptr) sums.scale_inv = backend::data<const float>(*args.scale_inv);
  const auto* in = backend::data<const uint8_t>(*args.input);
  auto* out = backend::data<uint8_t>(*args.output);
  const int64_t m = matrix.rows, k = matrix.cols;
  if (choose_quantize(args).whole) return transpose_tiles(ctx, args, matrix, sums);
  if (sums.partials != nullptr) {
    column_sums(ctx, m, k, sums.partials, *args.column_sums, false,
                Codes{Source(*args.input), k, sums.scale_inv});
  }
  if (m == 0 || k == 0) return;
  const int64_t tiles = ceil_div(m, 64);
  const dim3 grid(static_cast<unsigned>(ceil_div(k, 64)),
                  static_cast<unsigned>(std::min<int64_t>(tiles, 65535)),
                  static_cast<unsigned>(ceil_div(tiles, 65535)));
  transpose_kernel<<<grid, kThreads, 0, stream_of(ctx)>>>(in, out, m, k);
  check_launch("transpose_kernel");
}
size_t transpose_workspace(const te_fl_context&, const te_fl_fp8_transpose_args& args) {
  if (args.column_sums == nullptr) return 0;
  const backend::Matrix matrix = backend::as_matrix(*args.input);
  return column_sums_bytes(matrix.rows, matrix.cols);
}
Refusal refuse_transpose(const te_fl_fp8_transpose_args& args) {
  if (!all_dense(args.input, args.output, args.scale_inv, args.column_sums)) return kNotContiguous;
  if (args.column_sums != nullptr &&
      (overlaps(*args.column_sums, *args.input) || overlaps(*args.column_sums, *args.output))) {
    return kOverlaps;
  }
  return overlaps(*args.output, *args.input) ? kInPlace : nullptr;
}

}  // namespace

void append_dequantize(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_dequantize_args, dequantize, refuse_dequantize>("dequantize"));
  ops.back().describe = kDescribe<te_fl_dequantize_args>;
  ops.push_back(
      descriptor<te_fl_fp8_transpose_args, fp8_transpose, refuse_transpose>("fp8_transpose"));
  ops.back().describe = kDescribe<te_fl_fp8_transpose_args>;
  ops.back().later_args = "scale_inv column_sums";
  ops.back().workspace = backend::workspace_thunk<te_fl_fp8_transpose_args, transpose_workspace>;
}

}  // namespace te_fl::cuda
