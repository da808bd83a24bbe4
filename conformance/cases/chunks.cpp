#include <algorithm>
#include <numeric>

#include "conformance/case_file.hpp"
#include "conformance/compare.hpp"
#include "conformance/drawn.hpp"
#include "conformance/huge/chunks.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::conformance {
namespace {

struct ChunkVariant {
  int dtype = TE_FL_F32, index = TE_FL_I64;
  int probs = TE_FL_F32;  // dtype of the row factors; -1: none
  Dims sizes = {3, 0, 5, 1}, order = {2, 3, 0, 1};
  int64_t rest = 0;  // rows after the chunks
  int64_t width = 33;
  const char* wrong = nullptr;  // not null: part of the expected error text
  bool large = false;
  int64_t rows() const { return std::accumulate(sizes.begin(), sizes.end(), rest); }
};

std::string chunk_name(const ChunkVariant& v) {
  std::string name = std::string(name_of(v.dtype)) + "/" + name_of(v.index) + "/";
  name += v.sizes.size() <= 8 ? dims_name(v.sizes) + "@" + dims_name(v.order)
                              : std::to_string(v.sizes.size()) + "_chunks";
  name += "/H=" + std::to_string(v.width);
  if (v.rest != 0) name += "/rest=" + std::to_string(v.rest);
  return name + (v.probs < 0 ? "/no_probs" : std::string("/probs=") + name_of(v.probs));
}

Fill rows_of_values(int dtype) { return dtype == TE_FL_U8 ? integers(200) : gaussian(3); }
Fill numbers(const Dims& values) {
  return
      [values](Random&, int64_t i) { return static_cast<double>(values[static_cast<size_t>(i)]); };
}

// Returns the input row of each output row, computed row by row.
Dims sources(const ChunkVariant& v) {
  Dims from;
  for (const int64_t chunk : v.order) {
    int64_t first = 0;
    for (int64_t i = 0; i < chunk; ++i) first += v.sizes[static_cast<size_t>(i)];
    for (int64_t i = 0; i < v.sizes[static_cast<size_t>(chunk)]; ++i) from.push_back(first + i);
  }
  from.resize(static_cast<size_t>(v.rows()), -1);
  return from;
}

std::vector<double> taken(const Tensor& x, const Dims& from, int64_t width) {
  std::vector<double> want(from.size() * static_cast<size_t>(width), 0);
  for (size_t i = 0; i < want.size(); ++i) {
    const int64_t row = from[i / static_cast<size_t>(width)];
    if (row >= 0) want[i] = x.get(row * width + static_cast<int64_t>(i) % width);
  }
  return want;
}

void chunks_forward(Problem& p, const ChunkVariant& v) {
  const auto count = static_cast<int64_t>(v.sizes.size());
  const int64_t rows = std::max<int64_t>(v.rows(), 0);
  Tensor* x = p.in("input", v.dtype, {rows, v.width}, rows_of_values(v.dtype));
  p.in("split_sizes", v.index, {count}, numbers(v.sizes));
  p.in("sorted_index", v.index, {count}, numbers(v.order));
  Tensor* probs = v.probs >= 0 ? p.in("probs", v.probs, {rows}) : nullptr;
  Tensor* y = p.out("output", v.dtype, {rows, v.width});
  Tensor* map = p.out("row_id_map", TE_FL_I32, {rows});
  Tensor* moved = v.probs >= 0 ? p.out("permuted_probs", v.probs, {rows}) : nullptr;
  if (v.wrong != nullptr) p.expect_error(TE_FL_INVALID_ARGUMENT, v.wrong), p.late_error = true;
  p.oracle([&p, v, x, probs, y, map, moved, rows] {
    if (v.wrong != nullptr) return p.expect_unchanged(y);
    const Dims from = sources(v);
    std::vector<double> want_map(static_cast<size_t>(rows), -1);
    for (int64_t r = 0; r < rows; ++r)
      if (from[r] >= 0) want_map[from[r]] = static_cast<double>(r);
    p.expect_exact(y, taken(*x, from, v.width), v.dtype);
    p.expect_exact(map, want_map, TE_FL_F32);
    if (probs != nullptr) p.expect_exact(moved, taken(*probs, from, 1), v.probs);
  });
}

struct ChunkMapVariant {
  int dtype = TE_FL_F32, probs = TE_FL_F32;
  int64_t rows = 23, width = 33;
  int64_t dropped = 0;  // number of rows mapped to -1
  int64_t bad_row = 0;  // not 0: an invalid entry of the map
};
std::string chunk_map_name(const ChunkMapVariant& v) {
  std::string name = std::string(name_of(v.dtype)) + "/" + dims_name({v.rows, v.width});
  if (v.dropped != 0) name += "/dropped=" + std::to_string(v.dropped);
  if (v.bad_row != 0) name += "/row=" + std::to_string(v.bad_row);
  return name + (v.probs < 0 ? "/no_probs" : std::string("/probs=") + name_of(v.probs));
}

void chunks_backward(Problem& p, const ChunkMapVariant& v) {
  Dims from(static_cast<size_t>(v.rows));
  std::iota(from.begin(), from.end(), int64_t{0});
  for (int64_t i = v.rows - 1; i > 0; --i) std::swap(from[i], from[p.random.below(i + 1)]);
  for (int64_t i = 0; i < v.dropped; ++i) from[i * 3 % v.rows] = -1;
  if (v.bad_row != 0) from[5] = v.bad_row;
  Tensor* dy = p.in("grad_output", v.dtype, {v.rows, v.width}, rows_of_values(v.dtype));
  p.in("row_id_map", TE_FL_I32, {v.rows}, numbers(from));
  Tensor* dp = v.probs >= 0 ? p.in("grad_permuted_probs", v.probs, {v.rows}) : nullptr;
  Tensor* dx = p.out("grad_input", v.dtype, {v.rows, v.width});
  Tensor* back = v.probs >= 0 ? p.out("grad_probs", v.probs, {v.rows}) : nullptr;
  if (v.bad_row != 0) {
    p.expect_error(TE_FL_INVALID_ARGUMENT, "row_id_map[5] is " + std::to_string(v.bad_row));
    p.late_error = true;
  }
  p.oracle([&p, v, from, dy, dp, dx, back] {
    if (v.bad_row != 0) return p.expect_unchanged(dx);
    p.expect_exact(dx, taken(*dy, from, v.width), v.dtype);
    if (dp != nullptr) p.expect_exact(back, taken(*dp, from, 1), v.probs);
  });
}

bool is_high(int dtype) { return dtype == TE_FL_F32 || dtype == TE_FL_F16 || dtype == TE_FL_BF16; }

// Chunks with random sizes, some of them empty, in random order.
void draw_chunks(Random& r, int64_t count, int64_t most, ChunkVariant& v) {
  v.sizes.clear(), v.order.clear();
  for (int64_t i = 0; i < count; ++i) {
    v.sizes.push_back(r.below(4) == 0 ? 0 : r.below(most + 1)), v.order.push_back(i);
  }
  for (int64_t i = count - 1; i > 0; --i) std::swap(v.order[i], v.order[r.below(i + 1)]);
}

std::vector<ChunkVariant> forward_variants() {
  std::vector<ChunkVariant> all;
  for (int dtype : {TE_FL_F32, TE_FL_F16, TE_FL_BF16, TE_FL_F8E4M3, TE_FL_F8E5M2, TE_FL_U8})
    for (int index : {TE_FL_I32, TE_FL_I64}) all.push_back({.dtype = dtype, .index = index});
  for (int probs : {-1, int{TE_FL_F16}, int{TE_FL_BF16}})
    all.push_back({.dtype = TE_FL_BF16, .probs = probs, .width = 64});
  for (int64_t width : {0, 1, 2, 4, 8, 1030})
    all.push_back({.dtype = TE_FL_BF16, .rest = width == 8 ? 7 : 0, .width = width});
  all.push_back({.sizes = {}, .order = {}}), all.push_back({.sizes = {}, .order = {}, .rest = 4});
  all.push_back({.sizes = {9}, .order = {0}}), all.push_back({.sizes = {0, 0}, .order = {1, 0}});
  all.push_back({.rest = 5});
  Random r(7);
  for (int64_t count : {31, 512, 1300}) {  // the sizes exceed one block of threads
    ChunkVariant v{.dtype = TE_FL_BF16, .width = 8, .large = count > 512};
    draw_chunks(r, count, 9, v);
    all.push_back(v);
  }
  all.push_back({.sizes = {3, -4, 5}, .order = {2, 1, 0}, .wrong = "split_sizes[1] is -4"});
  all.push_back({.sizes = {3, 5}, .order = {1, 0}, .rest = -2, .wrong = "split_sizes[1] is 5"});
  for (int64_t bad : {4, -1}) {
    all.push_back({.order = {2, 3, bad, 1},
                   .wrong = bad == 4 ? "sorted_index[2] is 4" : "sorted_index[2] is -1"});
  }
  all.push_back({.order = {2, 3, 0, 2}, .wrong = "as an"});
  return all;
}

void add_cases(Table& table) {
  for (const ChunkVariant& v : forward_variants())
    add(
        table, "moe", "moe_sort_chunks_fwd", chunk_name(v),
        [v](Problem& p) { chunks_forward(p, v); }, v.large);
  std::vector<ChunkMapVariant> all;
  for (int dtype : {TE_FL_F32, TE_FL_F16, TE_FL_BF16, TE_FL_F8E4M3, TE_FL_F8E5M2, TE_FL_U8})
    all.push_back({.dtype = dtype, .probs = is_high(dtype) ? dtype : -1});
  for (int probs : {-1, int{TE_FL_F16}, int{TE_FL_BF16}})
    all.push_back({.dtype = TE_FL_BF16, .probs = probs, .width = 64, .dropped = 3});
  for (int64_t width : {0, 1, 2, 4, 8, 1030}) all.push_back({.dtype = TE_FL_BF16, .width = width});
  all.push_back({.rows = 0}), all.push_back({.rows = 1}), all.push_back({.dropped = 23});
  for (int64_t bad : {-2, 23, 2147483647}) all.push_back({.bad_row = bad});
  for (const ChunkMapVariant& v : all)
    add(table, "moe", "moe_sort_chunks_bwd", chunk_map_name(v),
        [v](Problem& p) { chunks_backward(p, v); });
}

void draw_cases(Drawn& drawn) {
  drawn.cases("moe", "moe_sort_chunks_fwd", [](Draw& r) -> DrawnCase {
    const Dims shape = Drawn::shape(r, 2);
    ChunkVariant v{.dtype = Drawn::high(r), .width = shape.back()};
    v.index = Drawn::chance(r, 2) ? TE_FL_I32 : TE_FL_I64, v.probs = Drawn::high(r);
    const int64_t elements = r.swept != nullptr && r.swept->large ? 3'000'000 : 200'000;
    draw_chunks(r, 1 + r.below(40), std::min(shape[0], 1 + elements / (40 * v.width)), v);
    if (Drawn::chance(r, 3)) v.rest = r.below(9);
    return {chunk_name(v) + "/rows=" + std::to_string(v.rows()),
            [v](Problem& p) { chunks_forward(p, v); }};
  });
  drawn.cases("moe", "moe_sort_chunks_bwd", [](Draw& r) -> DrawnCase {
    const Dims shape = Drawn::shape(r, 2);
    ChunkMapVariant v{.dtype = Drawn::high(r), .rows = shape[0], .width = shape.back()};
    v.probs = Drawn::high(r), v.dropped = r.below(v.rows + 1) / 2;
    return {chunk_map_name(v), [v](Problem& p) { chunks_backward(p, v); }};
  });
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::huge {
namespace {

void add_cases(Cases& cases) {
  using namespace chunk_calls;
  const Cases all = {
      {"moe_sort_chunks_fwd", "", [](Run& r) { sort(r, kCols); }},
      {"moe_sort_chunks_fwd", "odd rows", [](Run& r) { sort(r, kOddCols); }},
      {"moe_sort_chunks_bwd", "", [](Run& r) { gradient(r, kCols); }},
  };
  cases.insert(cases.end(), all.begin(), all.end());
}

}  // namespace
}  // namespace te_fl::huge

namespace te_fl::bench {
namespace {

void add_cases(Cases& cases) {
  constexpr int64_t kChunks = 64;
  both_dtypes(cases, "moe_sort_chunks_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_moe_sort_chunks_fwd_args>();
    BenchTensor& sizes = c.in({kChunks}, TE_FL_I64);
    BenchTensor& order = c.in({kChunks}, TE_FL_I64);
    for (int64_t i = 0; i < kChunks; ++i) {
      sizes.data<int64_t>()[i] = rows * (i + 1) / kChunks - rows * i / kChunks;
      order.data<int64_t>()[i] = i * 37 % kChunks;
    }
    a.input = c.in({rows, c.cols()}, dtype), a.split_sizes = sizes, a.sorted_index = order;
    a.probs = c.in({rows}, TE_FL_F32), a.permuted_probs = c.out({rows}, TE_FL_F32);
    a.output = c.out({rows, c.cols()}, dtype), a.row_id_map = c.out({rows}, TE_FL_I32);
  });
  both_dtypes(cases, "moe_sort_chunks_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_moe_sort_chunks_bwd_args>();
    BenchTensor& map = c.in({rows}, TE_FL_I32);
    for (int64_t r = 0; r < rows; ++r) {
      map.data<int32_t>()[r] = static_cast<int32_t>((r + rows / 2) % rows);
    }
    a.grad_output = c.in({rows, c.cols()}, dtype), a.row_id_map = map;
    a.grad_permuted_probs = c.in({rows}, TE_FL_F32), a.grad_probs = c.out({rows}, TE_FL_F32);
    a.grad_input = c.out({rows, c.cols()}, dtype);
  });
}

}  // namespace
}  // namespace te_fl::bench

namespace te_fl::conformance {

extern const CaseFile chunks_cases{
    .cases = add_cases, .drawn = draw_cases, .huge = huge::add_cases, .bench = bench::add_cases};

}  // namespace te_fl::conformance
