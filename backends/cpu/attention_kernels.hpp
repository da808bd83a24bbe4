// Kernels for one attention tile. A tile of scores is stored transposed, [keys, kQueries], with the
// queries along the vector lanes. Maxima and sums over keys then need no reduction across lanes,
// and the elements of K and V are read in memory order and broadcast to all lanes.
#pragma once

#include <cstdint>

namespace te_fl::cpu {

inline constexpr int64_t kQueries = 64;  // columns of a tile, and its leading dimension

// C[i, j] = sum over l of A(i, l) B[l, j], added to C if `accumulate`. A(i, l) is a[i * a_row + l *
// a_col]. B and C have stride 1 along n, which must be a multiple of kPad.
struct TileProduct {
  int64_t m, n, k;
  const float* a;
  int64_t a_row, a_col;
  const float* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  bool accumulate;
};
void tile_product(const TileProduct& product);

// The terms that are added to a tile's scores, and the masks that hide scores. The tile has `keys`
// rows from key `first_key` and `cols` columns (a multiple of kPad).
struct ScoreRules {
  int64_t first_key, keys, cols;
  const int32_t* begin;     // [kQueries]: a query sees keys [begin, end); NULL: all of the tile
  const int32_t* end;       // shape [kQueries]
  const float* bias;        // shape [keys, kQueries]; NULL: no bias
  const float* hidden;      // [keys, kQueries], not 0 if hidden; or NULL
  const float* alibi_from;  // by query: key position whose ALiBi distance is 0; NULL without ALiBi
  float slope;
  float softcap;     // 0: off; else a score becomes softcap * tanh(score / softcap) first
  float* cap_slope;  // [keys, kQueries]: receives softcap's derivative; or NULL
};

// The running maximum and sum of each query's softmax.
struct SoftmaxState {
  float top[kQueries];
  float sum[kQueries];
  float rescale[kQueries];  // output: factor for the sums of earlier tiles
};

// Turns scores into exp(score - top), times dropout's factors if given. Returns true if a `rescale`
// differs from 1.
bool softmax_step(const ScoreRules& rules, const float* dropout, float* scores,
                  SoftmaxState& state);
// Multiplies column j of rows [0, rows) by factor[j].
void scale_columns(float* tile, int64_t rows, int64_t cols, const float* factor);

// Backward: turns scores into the probabilities exp(score - lse).
void probabilities(const ScoreRules& rules, const float* lse, float* scores);
// Sets d_p to p * (dropout * d_p - delta), and then p to p * dropout.
void score_gradients(int64_t keys, int64_t cols, const float* delta, const float* dropout, float* p,
                     float* d_p);

// tile[j, c] *= factors[j, c].
void multiply_tile(int64_t keys, int64_t cols, const float* factors, float* tile);

// factors[j, c] = `kept` if dropout keeps element elements[c] + j of the random stream, else 0.
struct DropoutRules {
  uint64_t seed, offset;
  uint32_t threshold;  // result of dropout_threshold(); not 0
  float kept;
};
void dropout_tile(const DropoutRules& rules, const uint64_t* elements, int64_t keys, int64_t cols,
                  float* factors);

}  // namespace te_fl::cpu
