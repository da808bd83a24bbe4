#include "gemm_partition.hpp"

#include <algorithm>

namespace te_fl::cpu {
namespace {

// Minimum size of a block in multiply-adds. This many take about 10 us on one core; for less work
// it does not pay to wake a thread.
constexpr double kSmallestBlock = 1 << 19;

// Cost, in multiply-adds, of copying one element of A or B into a packed panel.
constexpr double kPackCostA = 16;
constexpr double kPackCostB = 8;
// Cost of adding one element of a partial C, which is written and read once more.
constexpr double kReduceCost = 40;

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// Returns the cost of the largest block in multiply-adds. Kernels work on tiles of at least 8 rows
// by 16 columns, and a partly filled tile costs as much as a full one.
double cost(int64_t m, int64_t n, int64_t k, const GemmPartition& p) {
  const auto rows = static_cast<double>(round_up(ceil_div(m, p.row_blocks), 8));
  const auto columns = static_cast<double>(round_up(ceil_div(n, p.column_blocks), 16));
  const auto depth = static_cast<double>(ceil_div(k, p.k_blocks));
  const double reduce = p.k_blocks > 1 ? kReduceCost * rows * columns : 0;
  return rows * columns * depth + (kPackCostA * rows + kPackCostB * columns) * depth + reduce;
}

}  // namespace

GemmPartition partition_gemm(int64_t m, int64_t n, int64_t k, int threads) {
  const double work = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  const auto blocks = static_cast<int64_t>(std::clamp(work / kSmallestBlock, 1.0, double(threads)));
  GemmPartition best{1, 1, 1};
  double best_cost = cost(m, n, k, best);
  for (int64_t k_blocks = 1; k_blocks <= std::min<int64_t>(blocks, ceil_div(k, 256)); ++k_blocks) {
    const int64_t grid = blocks / k_blocks;
    for (int64_t rows = std::min(grid, ceil_div(m, 8)); rows >= 1; --rows) {
      const GemmPartition candidate{rows, std::min(grid / rows, ceil_div(n, 16)), k_blocks};
      const double candidate_cost = cost(m, n, k, candidate);
      if (candidate_cost < best_cost * 0.97) {  // near ties prefer unsplit columns and sums
        best = candidate;
        best_cost = candidate_cost;
      }
    }
  }
  return best;
}

Range divide(int64_t size, int64_t blocks, int64_t align, int64_t i) {
  const int64_t units = ceil_div(size, align);
  const auto edge = [&](int64_t j) {
    return std::min(size, align * (j * (units / blocks) + std::min(j, units % blocks)));
  };
  return {edge(i), edge(i + 1) - edge(i)};
}

}  // namespace te_fl::cpu
