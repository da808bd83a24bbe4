// Device code shared by the attention kernels for Hopper's tensor cores: the division of work in a
// thread block, the ring of pipeline stages, and the computation of scores (scale, softcap, bias,
// ALiBi, masks).
//
// A thread block keeps a tile of 128 queries (or 128 keys), the "fixed" rows. Tiles of 64 keys (or
// queries), the "passing" rows, stream through the ring. Two warpgroups, the consumers ("product
// threads"), each multiply 64 fixed rows with the passing tiles. One or two more warpgroups, the
// producers ("fillers"), fill the stages. They copy the tiles, with zeros past a sequence's end,
// and the bits of pairs that the mask tensor hides or that dropout keeps (attention_bits.cu). Some
// kernels draw dropout's bits in the fillers instead, while the tensor cores multiply.
#pragma once

#include <type_traits>

#include "attention/attention_bits.cuh"
#include "attention/attention_products.cuh"

namespace te_fl::cuda::flash {

constexpr int kGroupThreads = 128;
constexpr int kProducts = 2 * kGroupThreads;  // product threads: the first of the block
// Number of filler threads. If keys pass, two warpgroups fill: the product threads leave enough
// registers for them, and each scheduler needs two filler warps to draw random numbers fast enough.
// If queries pass, one warpgroup fills.
template <bool kKeysPass>
constexpr int kFillers = kKeysPass ? 2 * kGroupThreads : kGroupThreads;
template <bool kKeysPass>
constexpr int kBlockThreads = kProducts + kFillers<kKeysPass>;
constexpr int kPairs = 32;  // scores per thread: 64 x 64 per warpgroup
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Bytes of a [rows, kDim] tile of 16-bit elements. It is stored as slices of 64 columns, each with
// rows of 128 bytes in the 128-byte swizzle.
template <int kDim>
constexpr int matrix_bytes(int rows) {
  return rows * kDim * 2;
}
constexpr int kBitsBytes = kFixed * 8;  // 64 bits per fixed row
// Row pitch in bytes of a bias tile in shared memory. The 16 bytes of padding avoid bank conflicts.
constexpr int bias_pitch(int cols) { return cols * 2 + 16; }

// Byte offsets in a pipeline stage. kKeysPass: the stage has 64 keys for the block's 128 queries;
// otherwise 64 queries for the block's 128 keys.
template <int kDim, bool kKeysPass>
struct Stage {
  static constexpr int kRows = kKeysPass ? kFixed : kPassing;  // queries of a stage's scores
  static constexpr int kCols = kKeysPass ? kPassing : kFixed;
  static constexpr int kSecond = matrix_bytes<kDim>(kPassing);  // V or dO follows K or Q
  static constexpr int kBias = 2 * kSecond;
  static constexpr int kKeep = kBias + kRows * bias_pitch(kCols);
  static constexpr int kHide = kKeep + kBitsBytes;
  static constexpr int kSums = kHide + kBitsBytes;  // offset of the QuerySums of 64 queries
  static constexpr int kEnd = kSums + (kKeysPass ? 0 : kPassing * 8);
  static constexpr int kBytes = (kEnd + 1023) / 1024 * 1024;
};

// The mbarriers of a ring of kStages pipeline stages, and the calling thread's position in the
// ring.
template <int kStages, int kFilling>
struct Ring {
  uint32_t full, empty;
  int stage = 0;
  uint32_t parity = 0;

  bool forms;  // fillers also write to the stage with plain stores

  // `barriers`: shared memory address of 2 kStages mbarriers of 8 bytes. `stores`: initial value of
  // `forms`.
  __device__ Ring(uint32_t barriers, bool stores)
      : full(barriers), empty(barriers + kStages * 8), forms(stores) {}
  __device__ void init() const {  // called by one thread
    for (int s = 0; s < kStages; ++s) {
      hopper::init_barrier(full + s * 8, forms ? 2 * kFilling : kFilling);
      hopper::init_barrier(empty + s * 8, kProducts);
    }
    hopper::fence_barrier_init();
  }
  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void wait_empty() const { hopper::wait_for(empty + stage * 8, parity ^ 1); }
  __device__ void wait_full() const {
    hopper::wait_for(full + stage * 8, parity);
    hopper::fence_for_copies();
  }
  // Called by every thread that has read the stage. (If one thread arrives for its warp after
  // __syncwarp(), compute-sanitizer's racecheck reports a race.)
  __device__ void release() const { hopper::arrive(empty + stage * 8); }
};

// The sequence and tile of a block. Consecutive blocks have different sequences: if the sequences
// share a bias, its tiles are then read from memory once. Tiles are in descending order of rows,
// because under a causal mask the last rows have the most keys.
struct BlockWork {
  int64_t b, tile;
  __device__ explicit BlockWork(const Attention& p)
      : b(blockIdx.x % static_cast<unsigned>(p.batch)),
        tile((gridDim.x - 1 - blockIdx.x) / static_cast<unsigned>(p.batch)) {}
};

// Half-open range of positions in a sequence.
struct Range {
  int begin = 0, end = 0;
  __device__ bool has(int i) const { return i >= begin && i < end; }
};
__device__ inline Range narrow(const backend::KeyRange& r, int64_t limit) {
  const int64_t begin = r.begin < limit ? r.begin : limit;
  return {static_cast<int>(begin), static_cast<int>(r.end < limit ? r.end : limit)};
}
__device__ inline Range visible_keys(const Attention& p, const Span& s, int64_t query) {
  return narrow(p.mask.keys(query, s.q_len, s.kv_len), s.kv_len);
}
__device__ inline Range visible_queries(const Attention& p, const Span& s, int64_t key) {
  return narrow(p.mask.queries(key, s.q_len, s.kv_len), s.q_len);
}
// Returns the union of the ranges that the rows [first, first + kFixed) see; range_of(i) is the
// range of row i, and `len` the number of rows. Requires range bounds that never decrease from row
// to row.
template <class RangeOf>
__device__ inline Range seen_by(int64_t first, int64_t len, const RangeOf& range_of) {
  const int64_t last = (first + kFixed < len ? first + kFixed : len) - 1;
  if (last < first) return {};
  return {range_of(first).begin, range_of(last).end};
}
// The tiles of kPassing positions that cover a range.
struct Tiles {
  int begin, count;
  __device__ explicit Tiles(const Range& r)
      : begin(r.begin / kPassing * kPassing),
        count(r.end > r.begin ? (r.end - begin + kPassing - 1) / kPassing : 0) {}
};

// ---- filling

__device__ inline int filler() { return static_cast<int>(threadIdx.x) - kProducts; }

// Copies rows [begin, begin + kRows) of one head to shared memory. Rows from `end` on and columns
// past the head's size become zeros. A thread copies the same 16-byte chunk of every kStep-th row,
// where kStep is a multiple of the swizzle's 8 rows.
template <class T, int kRows, int kDim, int kFilling>
__device__ inline void copy_rows(const HeadData& t, const T* head, int begin, int end,
                                 uint32_t to) {
  constexpr int kUnits = kDim / 8, kStep = kFilling / kUnits;
  const int row = filler() / kUnits, unit = filler() % kUnits;
  // The number of rows that exist from this thread's first row on.
  const int rows = unit * 8 < t.dim ? end - begin - row : 0;
  const T* from = head + (begin + row) * t.seq + unit * 8;
  const int64_t step = kStep * t.seq;
  to += (unit / 8) * (kRows * 128) + row * 128 + ((unit % 8) ^ (row & 7)) * 16;
#pragma unroll 4
  for (int n = 0; n < kRows / kStep; ++n, from += step) {
    hopper::copy_async(to + n * kStep * 128, from, n * kStep < rows ? 16 : 0);
  }
}

template <class T>
__device__ inline const T* head_at(const HeadData& t, int64_t b, int64_t origin, int64_t h) {
  return static_cast<const T*>(t.data) + t.offset(b, origin, h);
}

// Copies the bias of kRows queries from i0 and kCols keys from j0 to shared memory, with zeros
// outside the matrix. `whole`: the result of bias_is_whole().
template <class T, int kRows, int kCols, int kFilling>
__device__ inline void copy_bias(const Attention& p, const T* matrix, bool whole, int i0, int j0,
                                 uint32_t to) {
  constexpr int kPitch = bias_pitch(kCols);
  const ScoreData& d = p.bias;
  const int rows = static_cast<int>(p.seqlen_q), cols = static_cast<int>(p.seqlen_kv);
  if (whole) {  // copies 16-byte vectors
    constexpr int kUnits = kCols / 8, kStep = kFilling / kUnits;
    const int row = filler() / kUnits, unit = filler() % kUnits, i = i0 + row, j = j0 + unit * 8;
    const auto bytes = static_cast<uint32_t>(min(max(cols - j, 0), 8)) * 2;
    const T* from = matrix + i * d.row + j;
    const int64_t step = kStep * d.row;
    to += row * kPitch + unit * 16;
#pragma unroll 4
    for (int n = 0; n < kRows / kStep; ++n, from += step) {
      hopper::copy_async(to + n * kStep * kPitch, from, i + n * kStep < rows ? bytes : 0);
    }
    return;
  }
#pragma unroll 8
  for (int n = 0; n < kRows * kCols / kFilling; ++n) {
    const int index = filler() + n * kFilling, row = index / kCols, col = index % kCols;
    const int i = i0 + row, j = j0 + col;
    unsigned short value = 0;
    if (i < rows && j < cols) {
      value = *reinterpret_cast<const unsigned short*>(matrix + i * d.row + j * d.col);
    }
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + row * kPitch + col * 2), "h"(value)
                 : "memory");
  }
}
// True if every row of the bias can be read in 16-byte vectors.
__device__ inline bool bias_is_whole(const ScoreData& d) {
  return d.col == 1 && (d.row % 8 | d.head % 8 | d.batch % 8) == 0 &&
         reinterpret_cast<uintptr_t>(d.data) % 16 == 0;
}

// True if the kernels draw dropout's decisions themselves instead of reading bits from scratch.
inline bool draws(const Attention& p) { return p.threshold != 0 && p.keep.by_query == nullptr; }
// True if fillers write to a stage with plain stores: dropout bits, or a bias that 16-byte copies
// cannot read.
template <bool kDraws>
__device__ inline bool forms_words(const Attention& p) {
  return kDraws || (p.bias.data != nullptr && !bias_is_whole(p.bias));
}

__device__ inline void put_bits(uint32_t to, uint64_t bits) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(bits) : "memory");
}
__device__ inline void put_bits(uint32_t to, uint32_t bits) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
}

// Draws dropout's bits of queries [i0, i0 + 128) and 64 keys from j0 into one word per query.
// `matrix`: b * heads + h.
__device__ inline void draw_by_query(const Dropping& d, int64_t matrix, int i0, int j0,
                                     uint32_t to) {
  const int row = filler() % kFixed, half = filler() / kFixed;
  put_bits(to + row * 8 + half * 4, d.keep(matrix * d.rows + i0 + row, j0 + half * 32));
}
// Draws dropout's bits of keys [j0, j0 + 128) and 64 queries from i0 into one word per key.
__device__ inline void draw_by_key(const Dropping& d, int64_t matrix, int i0, int j0, uint32_t to) {
  const int lane = filler() % 32, j = j0 + filler() / 32 * 32;
  const int64_t row = matrix * d.rows + i0 + lane;
  const uint64_t high = transposed(d.keep(row + 32, j));
  put_bits(to + filler() * 8, transposed(d.keep(row, j)) | high << 32);
}

// Copies the 64-bit words of pair bits of a stage's 128 fixed rows to shared memory address `to`.
__device__ inline void copy_bits(const uint64_t* words, uint32_t to) {
  if (filler() < kFixed / 2) hopper::copy_async(to + filler() * 16, words + filler() * 2, 16);
}

// Fills the bias and the pair bits of a stage. kDraws: the value of draws() at launch. Kernels with
// kDraws false omit the code that draws random numbers, which leaves more registers for the copies.
template <class T, int kDim, bool kKeysPass, bool kDraws>
struct TermFiller {
  using Part = Stage<kDim, kKeysPass>;
  struct Nothing {
    __device__ explicit Nothing(const Attention&) {}
  };
  const Attention& p;
  bool bias_whole;
  std::conditional_t<kDraws, Dropping, Nothing> dropping;

  __device__ explicit TermFiller(const Attention& problem)
      : p(problem),
        bias_whole(problem.bias.data != nullptr && bias_is_whole(problem.bias)),
        dropping(problem) {}
  // Starts asynchronous copies of the pair bits; copy() also copies the bias. (i0, j0): the first
  // query and key of the stage.
  __device__ void copy_pair_bits(int64_t b, int64_t h, int i0, int j0, uint32_t keep,
                                 uint32_t hide) const {
    if (p.mask.arbitrary) copy_bits(p.hide.tile<kKeysPass>(b, h, i0, j0), hide);
    if (!kDraws && p.threshold != 0) copy_bits(p.keep.tile<kKeysPass>(b, h, i0, j0), keep);
  }
  __device__ void copy(int64_t b, int64_t h, int i0, int j0, uint32_t to) const {
    copy_pair_bits(b, h, i0, j0, to + Part::kKeep, to + Part::kHide);
    if (p.bias.data == nullptr) return;
    const T* matrix = static_cast<const T*>(p.bias.data) + b * p.bias.batch + h * p.bias.head;
    copy_bias<T, Part::kRows, Part::kCols, kFillers<kKeysPass>>(p, matrix, bias_whole, i0, j0,
                                                                to + Part::kBias);
  }
  // Draws dropout's bits and stores them in the stage.
  __device__ void form(int64_t b, int64_t h, int i0, int j0, uint32_t keep) const {
    if constexpr (kDraws && kKeysPass) {
      draw_by_query(dropping, b * p.heads + h, i0, j0, keep);
    } else if constexpr (kDraws) {
      draw_by_key(dropping, b * p.heads + h, i0, j0, keep);
    }
  }
};

// Fills `count` stages in order. issue(n, stage address) starts the asynchronous copies of tile n;
// form(n, stage address) stores computed words. The caller must call wait_copies() before the block
// ends.
template <int kBytes, int kStages, int kFilling, class Issue, class Form>
__device__ inline void fill_ring(Ring<kStages, kFilling>& ring, uint32_t stages, int count,
                                 const Issue& issue, const Form& form) {
  for (int n = 0; n < count; ++n, ring.next()) {
    const uint32_t at = stages + ring.stage * kBytes, full = ring.full + ring.stage * 8;
    ring.wait_empty();
    issue(n, at);
    hopper::arrive_after_copies(full);
    form(n, at);
    if (ring.forms) hopper::arrive(full);
  }
}

// ---- computing

__device__ inline float approx_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline uint64_t shared_bits(uint32_t at) {
  uint64_t bits;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(bits) : "r"(at) : "memory");
  return bits;
}
__device__ inline float2 shared_pair(uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}

// A product thread's position in a tile of scores. The thread holds fixed rows row() and row() + 8
// of 128, and passing columns 8 t + col() + {0, 1} of 64.
struct Place {
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int group() { return static_cast<int>(threadIdx.x) / kGroupThreads; }
  __device__ static int warp_row() { return static_cast<int>(threadIdx.x) / 32 * 16; }
  __device__ static int row() { return warp_row() + lane() / 4; }
  __device__ static int col() { return lane() % 4 * 2; }
};
// Calls f(n, i, c) for each of the thread's scores: n is its index, i (0 or 1) the index of its
// row, and c its column minus Place::col().
template <class F>
__device__ inline void each_score(const F& f) {
#pragma unroll
  for (int t = 0; t < 8; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) f(4 * t + 2 * i + e, i, 8 * t + e);
    }
  }
}

// The pair bits of a thread's two rows.
struct RowBits {
  uint64_t rows[2];
  __device__ explicit RowBits(uint32_t at) {
    rows[0] = shared_bits(at + Place::row() * 8) >> Place::col();
    rows[1] = shared_bits(at + (Place::row() + 8) * 8) >> Place::col();
  }
  __device__ bool at(int i, int column) const {
    const auto half = static_cast<uint32_t>(column < 32 ? rows[i] : rows[i] >> 32);
    return (half >> (column % 32) & 1) != 0;
  }
};

// Returns the derivative of softcap, computed from a capped score times log2(e) without bias or
// ALiBi. `inverse`: 1 / (cap times log2(e)).
__device__ inline float cap_slope(float score, float inverse) {
  const float part = score * inverse;
  return fmaxf(fmaf(-part, part, 1.0f), 0.0f);  // 0 for a hidden pair, whose score is -inf
}

// Computes a thread's scores of one head. apply() turns elements of q k^T into scores times
// log2(e), with -inf for hidden pairs.
template <class T, int kDim, bool kKeysPass>
struct Terms {
  using Part = Stage<kDim, kKeysPass>;
  const Attention& p;
  float scale, slope = 0.0f;
  float cap, into_cap;  // softcap log2(e), and 2 log2(e) scale / softcap; unused without softcap
  int shift;            // alibi_distance(i, j) equals j - i - shift
  Range seen[2] = {};   // range seen by each of the two fixed rows

  __device__ Terms(const Attention& problem, const Span& s)
      : p(problem),
        scale(problem.scale * kLog2e),
        cap(problem.softcap * kLog2e),
        into_cap(problem.scale / problem.softcap * (2 * kLog2e)),
        shift(static_cast<int>(s.kv_len - s.q_len)) {}
  __device__ void head(int64_t b, int64_t h) {
    if (p.alibi != nullptr) slope = p.alibi[b * p.alibi_batch + h * p.alibi_head] * kLog2e;
  }

  // Adds the bias tile at shared memory address `bias` to the scores.
  __device__ void add_bias(uint32_t bias, float (&s)[kPairs]) const {
    constexpr int kPitch = bias_pitch(Part::kCols);
    const int lane = Place::lane();
    // Address of this lane's row of 8 pairs for ldmatrix. The four 8 x 8 blocks are the thread's
    // two rows of 8 passing columns and of the next 8.
    const uint32_t row = kKeysPass
                             ? bias + (Place::warp_row() + lane % 16) * kPitch + lane / 16 * 16
                             : bias + (lane / 16 * 8 + lane % 8) * kPitch +
                                   (Place::warp_row() + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
      uint32_t w[4];
      if constexpr (kKeysPass) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(row + 8 * t * 2)
                     : "memory");
      } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(row + 8 * t * kPitch)
                     : "memory");
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 v = hopper::unpack<T>(w[n]);
        float* const to = s + 4 * t + 2 * n;
        to[0] = fmaf(v.x, kLog2e, to[0]);
        to[1] = fmaf(v.y, kLog2e, to[1]);
      }
    }
  }
  // Multiplies ds by the derivative of softcap at the scores `s` that apply() computed.
  __device__ void multiply_slopes(const float (&s)[kPairs], float (&ds)[kPairs]) const {
    if (p.softcap == 0) return;
    const float inverse = 1.0f / cap;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) ds[n] *= cap_slope(s[n], inverse);
  }
  // Turns the elements `s` of q k^T into scores. `fixed`: position of the first of the thread's two
  // rows. `passing`: position of the first column. `hide`: shared memory address of the tile's hide
  // bits. `add_bias` is called if the call has a bias.
  template <class AddBias>
  __device__ void apply(const AddBias& add_bias, uint32_t hide, int fixed, int passing,
                        float (&s)[kPairs]) const {
    if (p.softcap > 0) {
      // cap tanh(x / softcap) is computed as cap - 2 cap / (e^(2x / softcap) + 1). Its error is
      // about 2^-22 of the cap, which choose_attention() bounds. (tanh.approx has an error of 2^-11
      // of the score.)
#pragma unroll
      for (float& x : s) x = fmaf(-2.0f * cap, reciprocal(approx_exp2(x * into_cap) + 1.0f), cap);
    } else {
#pragma unroll
      for (float& x : s) x *= scale;
    }
    if (p.bias.data != nullptr) add_bias();
    const int column = passing + Place::col();
    if (p.alibi != nullptr) {
      const float first =
          static_cast<float>(kKeysPass ? column - fixed - shift : fixed - column - shift);
      each_score([&](int n, int i, int c) {
        const float distance = kKeysPass ? first + static_cast<float>(c - 8 * i)
                                         : first + static_cast<float>(8 * i - c);
        s[n] = fmaf(slope, distance, s[n]);
      });
    }
    const int begin = max(seen[0].begin, seen[1].begin), end = min(seen[0].end, seen[1].end);
    if (passing < begin || passing + kPassing > end) {
      each_score([&](int n, int i, int c) {
        if (!seen[i].has(column + c)) s[n] = -INFINITY;
      });
    }
    if (p.mask.arbitrary) {
      const RowBits bits(hide);
      each_score([&](int n, int i, int c) {
        if (bits.at(i, c)) s[n] = -INFINITY;
      });
    }
    __syncwarp();
  }
};

// Packs a thread's values of a 64 x 64 matrix into operand A of wgmma step k of 4 (16 columns
// each).
template <class T>
__device__ inline void pack_step(const float (&x)[kPairs], int k, uint32_t (&a)[4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n) a[n] = hopper::pack<T>(x[8 * k + 2 * n], x[8 * k + 2 * n + 1]);
}

// The wgmma operand A of a thread's two rows of a head, in registers, for all steps of 16 columns.
// Columns past the head's size are zeros.
template <class T, int kDim>
struct HeldRows {
  uint32_t pairs[kDim / 16][4];
  // `there[i]`: true if row i exists. `rows[i]` points to its first element and is read only if the
  // row exists.
  __device__ HeldRows(const T* const (&rows)[2], const bool (&there)[2], int dim) {
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = 16 * k + 8 * (n / 2) + Place::col();
        pairs[k][n] =
            there[n % 2] && at < dim ? *reinterpret_cast<const uint32_t*>(rows[n % 2] + at) : 0;
      }
    }
  }
};

// Starts the wgmma s = A B^T over the head dimension: A is in registers; B is the kPassing rows at
// shared memory address `b`.
template <class T, int kDim>
__device__ inline void start_held(const HeldRows<T, kDim>& a, uint32_t b, float (&s)[kPairs]) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const uint32_t at = b + k / 4 * (kPassing * 128) + k % 4 * 32;
    hopper::multiply_held(T(), s, a.pairs[k], hopper::along_k(at), k != 0);
  }
}
// Starts the wgmma s = A B^T: A is this warpgroup's 64 of the kFixed rows at shared memory address
// `a`; B is the kPassing rows at `b`.
template <class T, int kDim>
__device__ inline void start_shared(uint32_t a, uint32_t b, float (&s)[kPairs]) {
  a += Place::group() * 64 * 128;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    hopper::multiply_shared(T(), s, hopper::along_k(a + k / 4 * (kFixed * 128) + k % 4 * 32),
                            hopper::along_k(b + k / 4 * (kPassing * 128) + k % 4 * 32), k != 0);
  }
}
// Starts the wgmma sums += A B: A is packed in registers (pack_step()); B is the kPassing rows at
// shared memory address `b`.
template <class T, int kSums>
__device__ inline void start_across(const uint32_t (&a)[4][4], uint32_t b, float (&sums)[kSums]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    hopper::add_across(T(), sums, a[k], hopper::across_k(b + k * 2048, kPassing * 128));
  }
}

// Stores a thread's sums, times one factor per row, to its two rows of `t`.
template <class T, int kDim>
__device__ inline void store_rows(const HeadData& t, T* const (&rows)[2], const bool (&there)[2],
                                  const float (&sums)[kDim / 2], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    const int at = 8 * n + Place::col();
    if (at >= t.dim) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!there[i]) continue;
      *reinterpret_cast<uint32_t*>(rows[i] + at) =
          hopper::pack<T>(sums[4 * n + 2 * i] * factor[i], sums[4 * n + 2 * i + 1] * factor[i]);
    }
  }
}

}  // namespace te_fl::cuda::flash
