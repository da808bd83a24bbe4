// Cases of collectives. Each rank computes its own arguments, and those of the other ranks, from
// the case's seed. Each rank's oracle therefore knows the inputs of all ranks, and no data need to
// be gathered.
#include "te_fl/ops/collective.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "conformance/case_file.hpp"

namespace te_fl::conformance {
namespace {

constexpr int kReduced[] = {TE_FL_F64, TE_FL_F32, TE_FL_F16, TE_FL_BF16, TE_FL_I32, TE_FL_I64};
constexpr const char* kReductions[] = {"sum", "max", "avg"};

struct Variant {
  std::string op;
  int ranks = 2;
  int dtype = TE_FL_F32;
  Dims shape = {};  // of each rank's tensor, or of the rows of all_to_all_v
  int reduction = TE_FL_REDUCTION_SUM;
  int other = 0;         // the root, or the peer of rank 0 in send and recv
  int experts = 1;       // of each rank, in moe_dispatch and moe_combine
  bool numbers = false;  // their rows have probabilities and scales
  bool in_place = false, nan = false, large = false;
};

std::string variant_name(const Variant& v) {
  std::string name =
      std::to_string(v.ranks) + "ranks/" + name_of(v.dtype) + "/" + dims_name(v.shape);
  if (v.op == "barrier") name = std::to_string(v.ranks) + "ranks";
  if (v.op == "all_reduce" || v.op == "reduce_scatter")
    name += std::string("/") + kReductions[v.reduction];
  if (v.other != 0) name += "/rank" + std::to_string(v.other);
  if (v.op.starts_with("moe_")) name += "/" + std::to_string(v.experts) + "experts";
  if (v.numbers) name += "/probs_and_scales";
  return name + (v.in_place ? "/in_place" : "") + (v.nan ? "/nan" : "");
}

bool is_integer(int dtype) { return dtype >= TE_FL_I8; }

int64_t count_elements(const Dims& shape) {
  int64_t n = 1;
  for (const int64_t d : shape) n *= d;
  return n;
}

Dims times(Dims shape, int n) {
  if (shape.empty()) return {n};
  shape[0] *= n;
  return shape;
}

// ---- inputs of the ranks

// A random value. Sums of I32 values sometimes wrap around; sums of I64 values are exact in double.
double number(Random& random, int dtype) {
  if (dtype == TE_FL_I32) return static_cast<double>(static_cast<int32_t>(random.bits()));
  if (dtype == TE_FL_I64)
    return static_cast<double>(random.below(int64_t{1} << 40) - (int64_t{1} << 39));
  return random.gaussian();
}

// The input values of rank `rank` for a reduction, as they are stored.
std::vector<double> numbers(const Variant& v, int rank, int64_t n) {
  Problem scratch(v.op, hash_text(variant_name(v)) + static_cast<uint64_t>(rank));
  const Tensor* t = scratch.in("numbers", v.dtype, {n}, [&](Random& random, int64_t i) {
    const double drawn = number(random, v.dtype);
    return v.nan && rank == v.ranks - 1 && i % 3 == 1 ? NAN : drawn;
  });
  return t->values();
}

// The `n` input elements of rank `rank` for a collective that only copies data (such as
// all_gather), as bytes: random; 0 or 1 for bool.
std::vector<uint8_t> bytes(const Variant& v, int rank, int64_t n) {
  Random random(hash_text(variant_name(v)) + static_cast<uint64_t>(rank));
  std::vector<uint8_t> all(
      (static_cast<size_t>(n) * static_cast<size_t>(storage_bits(v.dtype)) + 7) / 8);
  for (uint8_t& byte : all) {
    byte = static_cast<uint8_t>(random.bits() & (v.dtype == TE_FL_BOOL ? 1 : 0xff));
  }
  return all;
}

void append(std::vector<uint8_t>& to, const std::vector<uint8_t>& from, size_t begin, size_t n) {
  to.insert(to.end(), from.begin() + static_cast<ptrdiff_t>(begin),
            from.begin() + static_cast<ptrdiff_t>(begin + n));
}

// Copies the bytes into the tensor, which may begin at an offset in its memory.
Tensor* put_bytes(Tensor* t, const std::vector<uint8_t>& from) {
  if (from.empty()) return t;
  std::memcpy(t->data->data() + t->c.dl.byte_offset, from.data(), from.size());
  t->data->freeze();
  return t;
}
Tensor* put_numbers(Tensor* t, const std::vector<double>& from) {
  for (size_t i = 0; i < from.size(); ++i) t->put(static_cast<int64_t>(i), from[i]);
  t->data->freeze();
  return t;
}

// Makes a tensor that is this rank's slice of `whole` and shares its memory.
Tensor* own_part(Problem& p, const char* name, Tensor* whole, const Dims& shape) {
  whole->role = Role::kInOut;
  return p.strided(name, Role::kInOut, whole->spec, shape, {}, constant(0), whole->data,
                   p.rank * count_elements(shape));
}

// ---- cases of reductions

double joined(const Variant& v, double a, double b) {
  if (v.reduction != TE_FL_REDUCTION_MAX) return a + b;
  return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);
}

// Wraps around like the dtype.
double wrapped(int dtype, double sum) {
  if (dtype != TE_FL_I32) return sum;
  return static_cast<double>(
      static_cast<int32_t>(static_cast<uint32_t>(static_cast<int64_t>(sum))));
}

// Expects the elements [begin, begin + n) of the reduction's result, where n is the number of
// elements of `t`. The tolerance allows a provider to add in another order and to round after each
// addition.
void expect_reduced(Problem& p, const Variant& v, Tensor* t, int64_t begin, int64_t all) {
  const int64_t n = t->numel();
  std::vector<double> want(static_cast<size_t>(n)), size(static_cast<size_t>(n));
  for (int r = 0; r < v.ranks; ++r) {
    const std::vector<double> from = numbers(v, r, all);
    for (int64_t i = 0; i < n; ++i) {
      const double x = from[static_cast<size_t>(begin + i)];
      want[i] = r == 0 ? x : joined(v, want[i], x);
      size[i] += std::isnan(x) ? 0 : std::abs(x);
    }
  }
  if (v.reduction == TE_FL_REDUCTION_AVG) {
    for (int64_t i = 0; i < n; ++i) want[i] /= v.ranks, size[i] /= v.ranks;
  }
  if (v.reduction == TE_FL_REDUCTION_MAX) return (void)p.expect_exact(t, want, v.dtype);
  for (double& x : want) x = is_integer(v.dtype) ? wrapped(v.dtype, x) : x;
  if (is_integer(v.dtype)) return (void)p.expect_exact(t, want, v.dtype);
  const double unit = v.dtype == TE_FL_F64   ? 0x1p-53
                      : v.dtype == TE_FL_F32 ? 0x1p-24
                      : v.dtype == TE_FL_F16 ? 0x1p-11
                                             : 0x1p-8;
  for (double& x : size) x *= unit * v.ranks;
  p.expect(t, want, size);
}

void all_reduce(Problem& p, const Variant& v) {
  const int64_t n = count_elements(v.shape);
  Tensor* in = put_numbers(p.in("input", v.dtype, v.shape), numbers(v, p.rank, n));
  Tensor* out = v.in_place ? p.in_place("output", in) : p.out("output", v.dtype, v.shape);
  p.set("reduction", v.reduction);
  p.oracle([&p, v, out, n] { expect_reduced(p, v, out, 0, n); });
}

void reduce_scatter(Problem& p, const Variant& v) {
  const int64_t n = count_elements(v.shape), all = n * v.ranks;
  Tensor* in =
      put_numbers(p.in("input", v.dtype, times(v.shape, v.ranks)), numbers(v, p.rank, all));
  Tensor* out;
  if (v.in_place) {
    out = own_part(p, "output", in, v.shape);
    put_numbers(in, numbers(v, p.rank, all));
  } else {
    out = p.out("output", v.dtype, v.shape);
  }
  p.set("reduction", v.reduction);
  p.oracle([&p, v, out, n, all] { expect_reduced(p, v, out, p.rank * n, all); });
}

// ---- cases of collectives that copy

void all_gather(Problem& p, const Variant& v) {
  const int64_t n = count_elements(v.shape);
  Tensor* out = p.out("output", v.dtype, times(v.shape, v.ranks));
  Tensor* in = v.in_place ? own_part(p, "input", out, v.shape) : p.in("input", v.dtype, v.shape);
  put_bytes(in, bytes(v, p.rank, n));
  p.oracle([&p, v, out, n] {
    std::vector<uint8_t> want;
    for (int r = 0; r < v.ranks; ++r) {
      const std::vector<uint8_t> part = bytes(v, r, n);
      append(want, part, 0, part.size());
    }
    p.expect_bytes(out, want);
  });
}

void all_to_all(Problem& p, const Variant& v) {
  const int64_t all = count_elements(v.shape) * v.ranks;
  put_bytes(p.in("input", v.dtype, times(v.shape, v.ranks)), bytes(v, p.rank, all));
  Tensor* out = p.out("output", v.dtype, times(v.shape, v.ranks));
  p.oracle([&p, v, out, all] {
    std::vector<uint8_t> want;
    for (int r = 0; r < v.ranks; ++r) {
      const std::vector<uint8_t> from = bytes(v, r, all);
      const size_t part = from.size() / static_cast<size_t>(v.ranks);
      append(want, from, part * static_cast<size_t>(p.rank), part);
    }
    p.expect_bytes(out, want);
  });
}

// The number of rows that one rank has for another; some pairs have none.
int64_t rows_between(const Variant& v, int from, int to) {
  return v.shape[0] == 0 ? 0 : (from * 3 + to * 2 + v.shape[0]) % (v.shape[0] + 2);
}

void all_to_all_v(Problem& p, const Variant& v) {
  std::vector<int64_t> to, from;
  int64_t rows_in = 0, rows_out = 0;
  for (int r = 0; r < v.ranks; ++r) {
    to.push_back(rows_between(v, p.rank, r)), from.push_back(rows_between(v, r, p.rank));
    rows_in += to.back(), rows_out += from.back();
  }
  Dims in_shape = v.shape, out_shape = v.shape;
  in_shape[0] = rows_in, out_shape[0] = rows_out;
  put_bytes(p.in("input", v.dtype, in_shape), bytes(v, p.rank, count_elements(in_shape)));
  Tensor* out = p.out("output", v.dtype, out_shape);
  p.list("input_rows", to), p.list("output_rows", from);
  p.oracle([&p, v, out] {
    const int64_t row = count_elements({v.shape.begin() + 1, v.shape.end()});
    const auto row_bytes = static_cast<size_t>(row * storage_bits(v.dtype) / 8);
    std::vector<uint8_t> want;
    for (int r = 0; r < v.ranks; ++r) {
      int64_t before = 0, all = 0;
      for (int q = 0; q < v.ranks; ++q) {
        all += rows_between(v, r, q);
        if (q < p.rank) before = all;
      }
      append(want, bytes(v, r, all * row), static_cast<size_t>(before) * row_bytes,
             static_cast<size_t>(rows_between(v, r, p.rank)) * row_bytes);
    }
    p.expect_bytes(out, want);
  });
}

// The number of rows that moe_dispatch sends from one rank for expert e of another rank.
int64_t rows_for(const Variant& v, int from, int to, int e) {
  return v.shape[0] == 0 ? 0 : (from * 3 + to * 2 + e * 5 + v.shape[0]) % (v.shape[0] + 2);
}

// A run of rows in the input of a rank: its number of rows, its peer, and the expert's number on
// the rank that has it.
struct Run {
  int64_t rows;
  int peer, expert;
};

// The runs in the input of `rank`: of moe_dispatch by peer, then by expert; of moe_combine by
// expert, then by peer.
std::vector<Run> sent_runs(const Variant& v, int rank) {
  std::vector<Run> runs;
  if (v.op == "moe_dispatch") {
    for (int peer = 0; peer < v.ranks; ++peer)
      for (int e = 0; e < v.experts; ++e) runs.push_back({rows_for(v, rank, peer, e), peer, e});
  } else {
    for (int e = 0; e < v.experts; ++e)
      for (int peer = 0; peer < v.ranks; ++peer)
        runs.push_back({rows_for(v, peer, rank, e), peer, e});
  }
  return runs;
}

int64_t sum_of(const std::vector<Run>& runs) {
  int64_t sum = 0;
  for (const Run& run : runs) sum += run.rows;
  return sum;
}

// Adds the tensor `name` of rows, and the output that the rows of all ranks must fill.
void moved_rows(Problem& p, const Variant& v, const char* name, const char* out_name, int dtype,
                const Dims& row, int64_t received) {
  Variant seed = v;
  seed.dtype = dtype;
  seed.shape.insert(seed.shape.end(), row.begin(), row.end());
  Dims in_shape = {sum_of(sent_runs(v, p.rank))}, out_shape = {received};
  in_shape.insert(in_shape.end(), row.begin(), row.end());
  out_shape.insert(out_shape.end(), row.begin(), row.end());
  put_bytes(p.in(name, dtype, in_shape), bytes(seed, p.rank, count_elements(in_shape)));
  Tensor* out = p.out(out_name, dtype, out_shape);
  p.oracle([&p, v, seed, row, out] {
    const int64_t elements = count_elements(row);
    const auto row_bytes = static_cast<size_t>(elements * storage_bits(seed.dtype) / 8);
    const bool by_expert = v.op == "moe_dispatch";
    std::vector<uint8_t> want;
    for (int outer = 0; outer < (by_expert ? v.experts : v.ranks); ++outer) {
      for (int inner = 0; inner < (by_expert ? v.ranks : v.experts); ++inner) {
        const int from = by_expert ? inner : outer, e = by_expert ? outer : inner;
        const std::vector<Run> runs = sent_runs(v, from);
        int64_t before = 0;
        for (const Run& run : runs) {
          if (run.peer == p.rank && run.expert == e) {
            append(want, bytes(seed, from, sum_of(runs) * elements),
                   static_cast<size_t>(before) * row_bytes,
                   static_cast<size_t>(run.rows) * row_bytes);
          }
          before += run.rows;
        }
      }
    }
    p.expect_bytes(out, want);
  });
}

void moe_rows(Problem& p, const Variant& v) {
  std::vector<int64_t> to, from;
  const bool dispatches = v.op == "moe_dispatch";
  int64_t received = 0;
  for (int r = 0; r < v.ranks; ++r) {
    for (int e = 0; e < v.experts; ++e) {
      const int64_t mine = rows_for(v, p.rank, r, e), theirs = rows_for(v, r, p.rank, e);
      to.push_back(dispatches ? mine : theirs), from.push_back(dispatches ? theirs : mine);
      received += from.back();
    }
  }
  moved_rows(p, v, "input", "output", v.dtype, {v.shape.begin() + 1, v.shape.end()}, received);
  if (v.numbers) {
    const int probs = v.dtype == TE_FL_F16 || v.dtype == TE_FL_BF16 ? v.dtype : TE_FL_F32;
    moved_rows(p, v, "probs", "output_probs", probs, {}, received);
    moved_rows(p, v, "scales", "output_scales", v.ranks % 2 == 0 ? TE_FL_F32 : TE_FL_U8, {3},
               received);
  }
  p.list("input_rows", to), p.list("output_rows", from);
}

void broadcast(Problem& p, const Variant& v) {
  const int64_t n = count_elements(v.shape);
  Tensor* data = put_bytes(p.inout("data", v.dtype, v.shape, constant(0)), bytes(v, p.rank, n));
  p.set("root", v.other);
  p.oracle([&p, v, data, n] { p.expect_bytes(data, bytes(v, v.other, n)); });
}

// Rank 0 and its peer run a transfer: rank 0 sends in the cases of send and receives in those of
// recv.
void point_to_point(Problem& p, const Variant& v) {
  const int64_t n = count_elements(v.shape);
  p.op_name = p.rank == 0 ? v.op : p.rank != v.other ? "" : v.op == "send" ? "recv" : "send";
  if (p.op_name.empty()) return;
  p.set("peer", p.rank == 0 ? v.other : 0);
  if (p.op_name == "send")
    return (void)put_bytes(p.in("input", v.dtype, v.shape), bytes(v, p.rank, n));
  Tensor* out = p.out("output", v.dtype, v.shape);
  p.oracle([&p, v, out, n] { p.expect_bytes(out, bytes(v, p.rank == 0 ? v.other : 0, n)); });
}

// ---- table of cases

void build(Problem& p, const Variant& v) {
  if (v.op == "all_reduce") return all_reduce(p, v);
  if (v.op == "reduce_scatter") return reduce_scatter(p, v);
  if (v.op == "all_gather") return all_gather(p, v);
  if (v.op == "all_to_all") return all_to_all(p, v);
  if (v.op == "all_to_all_v") return all_to_all_v(p, v);
  if (v.op.starts_with("moe_")) return moe_rows(p, v);
  if (v.op == "broadcast") return broadcast(p, v);
  if (v.op == "send" || v.op == "recv") return point_to_point(p, v);
}

void add(Table& table, const Variant& v) {
  add(
      table, "collective", v.op, variant_name(v), [v](Problem& p) { build(p, v); }, v.large,
      v.ranks);
}

void add_reductions(Table& table) {
  for (const std::string op : {"all_reduce", "reduce_scatter"}) {
    for (const int dtype : kReduced) {
      for (int reduction = 0; reduction < (is_integer(dtype) ? 2 : 3); ++reduction) {
        const int ranks = 1 + (dtype + reduction) % 4;
        add(table,
            {.op = op, .ranks = ranks, .dtype = dtype, .shape = {5, 7}, .reduction = reduction});
        add(table, {.op = op,
                    .ranks = 2,
                    .dtype = dtype,
                    .shape = {1031},
                    .reduction = reduction,
                    .in_place = true});
      }
      add(table, {.op = op, .ranks = 3, .dtype = dtype, .shape = {1}, .in_place = true});
    }
    for (const int ranks : {1, 2, 3, 4}) {
      add(table, {.op = op, .ranks = ranks, .shape = {0, 3}});
      add(table, {.op = op, .ranks = ranks, .shape = {3, 1, 67}});
    }
    for (const int dtype : {TE_FL_F32, TE_FL_BF16})
      add(table, {.op = op,
                  .ranks = 4,
                  .dtype = dtype,
                  .shape = {9},
                  .reduction = TE_FL_REDUCTION_MAX,
                  .nan = true});
    add(table, {.op = op, .ranks = 2, .dtype = TE_FL_BF16, .shape = {1 << 20}, .large = true});
  }
  add(table, {.op = "all_reduce", .ranks = 2, .shape = {}});
}

void add_copies(Table& table) {
  for (const std::string op :
       {"all_gather", "all_to_all", "all_to_all_v", "broadcast", "send", "recv"}) {
    const int least = op == "send" || op == "recv" ? 2 : 1;
    const bool peer = op == "send" || op == "recv", other = peer || op == "broadcast";
    for (int dtype = 0; dtype < TE_FL_DTYPE_COUNT; ++dtype)
      add(table, {.op = op,
                  .ranks = 2 + dtype % 3,
                  .dtype = dtype,
                  .shape = {3, 10},
                  .other = other ? 1 : 0});
    for (int ranks = least; ranks <= 4; ++ranks) {
      const int last = other ? ranks - 1 : 0;
      add(table, {.op = op, .ranks = ranks, .shape = {0, 5}, .other = last});
      add(table, {.op = op, .ranks = ranks, .dtype = TE_FL_U8, .shape = {1, 1}, .other = last});
      add(table,
          {.op = op, .ranks = ranks, .dtype = TE_FL_BF16, .shape = {13, 3, 11}, .other = last});
    }
    add(table,
        {.op = op, .ranks = 2, .shape = {1 << 10, 1 << 9}, .other = peer ? 1 : 0, .large = true});
  }
  for (const std::string op : {"moe_dispatch", "moe_combine"}) {
    for (int dtype = 0; dtype < TE_FL_DTYPE_COUNT; ++dtype)
      add(table, {.op = op,
                  .ranks = 2 + dtype % 3,
                  .dtype = dtype,
                  .shape = {3, 10},
                  .experts = 1 + dtype % 2,
                  .numbers = dtype % 2 == 0});
    for (int ranks = 1; ranks <= 4; ++ranks) {
      for (const int experts : {1, 3}) {
        add(table,
            {.op = op, .ranks = ranks, .shape = {0, 5}, .experts = experts, .numbers = true});
        add(table, {.op = op,
                    .ranks = ranks,
                    .dtype = TE_FL_BF16,
                    .shape = {9, 33},
                    .experts = experts,
                    .numbers = true});
      }
    }
    add(table, {.op = op, .ranks = 2, .shape = {1 << 8, 1 << 9}, .experts = 4, .large = true});
  }
  for (const int ranks : {1, 2, 4}) {
    for (const int dtype : {TE_FL_F32, TE_FL_F8E4M3, TE_FL_U8})
      add(table,
          {.op = "all_gather", .ranks = ranks, .dtype = dtype, .shape = {4, 9}, .in_place = true});
  }
  for (const int root : {0, 2})
    add(table, {.op = "broadcast", .ranks = 3, .shape = {17}, .other = root});
  for (const int ranks : {1, 2, 3, 4}) add(table, {.op = "barrier", .ranks = ranks});
}

// ---- invalid calls, which every rank makes

void add_mistake(Table& table, const std::string& op, const std::string& name,
                 const std::string& text, std::function<void(Problem&)> f) {
  add(
      table, "collective", op, "mistake/" + name,
      [f = std::move(f), text](Problem& p) {
        f(p);
        p.expect_error(TE_FL_INVALID_ARGUMENT, text);
      },
      false, 2);
}

void add_mistakes(Table& table) {
  add_mistake(table, "all_reduce", "mean_of_integers", "reduction", [](Problem& p) {
    p.in("input", TE_FL_I32, {4}, integers(9)), p.out("output", TE_FL_I32, {4});
    p.set("reduction", TE_FL_REDUCTION_AVG);
  });
  add_mistake(table, "all_reduce", "strided", "'input' is not compact", [](Problem& p) {
    p.strided("input", Role::kIn, TE_FL_F32, {4, 2}, {3, 1}), p.out("output", TE_FL_F32, {4, 2});
  });
  add_mistake(table, "all_gather", "size", "output holds comm times input",
              [](Problem& p) { p.in("input", TE_FL_F32, {4}), p.out("output", TE_FL_F32, {9}); });
  add_mistake(table, "all_to_all", "odd", "do not divide into 2 equal parts",
              [](Problem& p) { p.in("input", TE_FL_F32, {5}), p.out("output", TE_FL_F32, {5}); });
  add_mistake(table, "all_to_all_v", "rows", "sums to 4", [](Problem& p) {
    p.in("input", TE_FL_F32, {5, 2}), p.out("output", TE_FL_F32, {4, 2});
    p.list("input_rows", {2, 2}), p.list("output_rows", {2, 2});
  });
  for (const std::string op : {"moe_dispatch", "moe_combine"}) {
    const auto call = [](Problem& p, int64_t rows, std::vector<int64_t> to,
                         std::vector<int64_t> from) {
      p.in("input", TE_FL_F32, {rows, 2}), p.out("output", TE_FL_F32, {4, 2});
      p.list("input_rows", std::move(to)), p.list("output_rows", std::move(from));
    };
    add_mistake(table, op, "rows", "T == sum(input_rows)", [call](Problem& p) {
      call(p, 5, {2, 2}, {2, 2});
    });
    add_mistake(table, op, "experts", "ranks must have equally many experts", [call](Problem& p) {
      call(p, 4, {2, 1, 1}, {2, 1, 1});
    });
    add_mistake(table, op, "lists", "have 2 and 4 numbers", [call](Problem& p) {
      call(p, 4, {2, 2}, {1, 1, 1, 1});
    });
    add_mistake(table, op, "own", "this one, sends itself it receives", [call](Problem& p) {
      call(p, 4, {2, 2}, p.rank == 0 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{3, 1});
    });
    add_mistake(table, op, "probs", "output_probs", [call](Problem& p) {
      call(p, 4, {2, 2}, {2, 2});
      p.in("probs", TE_FL_F32, {4});
    });
  }
  add_mistake(table, "broadcast", "root", "rank 2 of a communicator of 2",
              [](Problem& p) { p.inout("data", TE_FL_F32, {4}), p.set("root", 2); });
  add_mistake(table, "send", "to_itself", "this very rank",
              [](Problem& p) { p.in("input", TE_FL_F32, {4}), p.set("peer", p.rank); });
}

void add_cases(Table& table) {
  add_reductions(table);
  add_copies(table);
  add_mistakes(table);
}

}  // namespace
}  // namespace te_fl::conformance

namespace te_fl::conformance {

extern const CaseFile collective_cases{.cases = add_cases};

}  // namespace te_fl::conformance
