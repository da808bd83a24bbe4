// Packs the mask tensor and dropout's decisions into one bit per (query, key) pair. The tensor-core
// kernels then copy these bits to shared memory like their other operands. Each warp packs 32
// queries by 32 keys.
#include "attention/attention_bits.cuh"
#include "attention/attention_hopper.hpp"

namespace te_fl::cuda {
namespace flash {
namespace {

constexpr int kBlock = kFixed;    // threads; they pack 32 queries by 128 keys per iteration
constexpr int kRun = 8 * kBlock;  // number of keys per block

// Returns one bit per byte, lowest byte first. A bit is set if its byte is not 0.
__device__ inline uint32_t pack_bits(uint32_t bytes) {
  const uint32_t high = ((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu | bytes) & 0x80808080u;
  return (high >> 7) * 0x10204080u >> 28;  // the product gathers the four bits in the top four
}
__device__ inline uint32_t pack_bits(const uint4& v) {
  return pack_bits(v.x) | pack_bits(v.y) << 4 | pack_bits(v.z) << 8 | pack_bits(v.w) << 12;
}

// Reads from the mask tensor which pairs of query and key are masked out.
struct HiddenPairs {
  const ScoreData mask;
  const int64_t rows, cols, heads;
  const bool whole;  // every row can be read in 16-byte vectors

  __device__ explicit HiddenPairs(const Attention& p)
      : mask(p.attn_mask),
        rows(p.seqlen_q),
        cols(p.seqlen_kv),
        heads(p.hide.head == 0 ? 1 : p.heads),
        whole(mask.col == 1 && (mask.row % 16 | mask.head % 16 | mask.batch % 16) == 0 &&
              reinterpret_cast<uintptr_t>(mask.data) % 16 == 0) {}
  // Returns the bits of query i for the 32 keys from j0. Bits of pairs outside the matrix are 0.
  __device__ uint32_t operator()(int64_t matrix, int64_t i, int64_t j0) const {
    if (i >= rows || j0 >= cols) return 0;
    const uint8_t* from =
        static_cast<const uint8_t*>(mask.data) + mask.offset(matrix / heads, matrix % heads, i, j0);
    if (whole && j0 + 32 <= cols) {
      const auto* const words = reinterpret_cast<const uint4*>(from);
      return pack_bits(words[0]) | pack_bits(words[1]) << 16;
    }
    uint32_t bits = 0;
    const int count = static_cast<int>(cols - j0 < 32 ? cols - j0 : 32);
    for (int n = 0; n < count; ++n) bits |= from[n * mask.col] != 0 ? 1u << n : 0;
    return bits;
  }
};

// The pairs that dropout keeps. If masks hide all 32 keys from all queries of the warp, the bits
// are 0 and no random numbers are drawn.
struct KeptPairs {
  const Attention& p;
  const Dropping dropping;

  __device__ explicit KeptPairs(const Attention& problem) : p(problem), dropping(problem) {}
  __device__ uint32_t operator()(int64_t matrix, int64_t i, int64_t j0) const {
    const Span s = p.span(matrix / p.heads);
    const int64_t lane = threadIdx.x % 32, first = i - lane;
    const int64_t last = (first + 32 < s.q_len ? first + 32 : s.q_len) - 1;
    if (last < first) return 0;
    if (p.mask.keys(first, s.q_len, s.kv_len).begin >= j0 + 32) return 0;
    if (p.mask.keys(last, s.q_len, s.kv_len).end <= j0) return 0;
    return dropping.keep(matrix * dropping.rows + i, j0);
  }
};

template <class Pairs>
__global__ void __launch_bounds__(kBlock)
    pack_bits_kernel(const __grid_constant__ Attention p, const __grid_constant__ PairBits out) {
  const Pairs pairs(p);
  const int64_t across = ceil_div(out.keys, kRun), rows = round_up(out.queries, kPassing);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t i0 = blockIdx.x / across * 32, begin = blockIdx.x % across * kRun;
  const int64_t whole = round_up(out.keys, kBlock);
  const int64_t end = begin + kRun < whole ? begin + kRun : whole;
  for (int64_t matrix = blockIdx.y; matrix < out.matrices; matrix += gridDim.y) {
    for (int64_t j0 = begin + warp * 32; j0 < end; j0 += kBlock) {
      const uint32_t bits = pairs(matrix, i0 + lane, j0);
      // The warp stores half of the word of query i0 + lane, then half of the word of key j0 +
      // lane.
      if (j0 < round_up(out.keys, kPassing)) {
        uint64_t* const word = out.words_by_query(matrix, i0 + lane, j0);
        reinterpret_cast<uint32_t*>(word)[j0 / 32 % 2] = bits;
      }
      if (out.by_key == nullptr || i0 >= rows) continue;
      uint64_t* const word = out.words_by_key(matrix, i0, j0 + lane);
      reinterpret_cast<uint32_t*>(word)[i0 / 32 % 2] = transposed(bits);
    }
  }
}

template <class Pairs>
void pack(cudaStream_t stream, const Attention& p, const PairBits& out) {
  const int64_t tiles = round_up(out.queries, kFixed) / 32 * ceil_div(out.keys, kRun);
  if (tiles == 0 || out.matrices == 0) return;
  const dim3 grid(static_cast<unsigned>(tiles),
                  static_cast<unsigned>(std::min<int64_t>(out.matrices, 65535)));
  pack_bits_kernel<Pairs><<<grid, kBlock, 0, stream>>>(p, out);
  check_launch("pack_bits_kernel");
}

}  // namespace
}  // namespace flash

void pack_pair_bits(cudaStream_t stream, const Attention& p) {
  if (p.hide.by_query != nullptr) flash::pack<flash::HiddenPairs>(stream, p, p.hide);
  if (p.keep.by_query != nullptr) flash::pack<flash::KeptPairs>(stream, p, p.keep);
}

}  // namespace te_fl::cuda
