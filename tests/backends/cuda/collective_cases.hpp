// Runs every collective on this rank's GPU memory and compares with its formula. The values are
// small integers, whose sums are exact in every dtype and summation order.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "support/expect.hpp"
#include "te_fl/comm.hpp"
#include "te_fl/numeric.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::testing {

using Values = std::vector<double>;

// Element i of the input of rank r.
inline double rank_value(int rank, int64_t i) {
  return static_cast<double>((i * 7 + rank * 13) % 17 - 5);
}
inline Values rank_values(int rank, int64_t n) {
  Values v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) v[static_cast<size_t>(i)] = rank_value(rank, i);
  return v;
}

template <class F>
void visit_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF64:
      return f(double{});
    case DType::kF16:
      return f(numeric::half{});
    case DType::kBF16:
      return f(numeric::bfloat16{});
    case DType::kI32:
      return f(int32_t{});
    case DType::kI64:
      return f(int64_t{});
    case DType::kU8:
    case DType::kF8E4M3:  // raw codes
      return f(uint8_t{});
    default:
      return f(float{});
  }
}
template <class T>
T to_element(double v) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<int64_t>(v));
  } else {
    return numeric::from_double<T>(v);
  }
}

// A tensor on a rank's GPU.
struct OnGpu {
  Tensor tensor;
  DType dtype;
  OnGpu(const Device& device, DType d, int64_t n) : dtype(d) {
    tensor = Tensor::empty({n}, dtype, device).value();
  }
  OnGpu(const Device& device, DType d, const Values& values)
      : OnGpu(device, d, static_cast<int64_t>(values.size())) {
    put(values);
  }
  void put(const Values& values) {
    visit_element(dtype, [&]<class T>(T) {
      std::vector<T> host;
      for (const double v : values) host.push_back(to_element<T>(v));
      ASSERT_OK(devices::copy(tensor.device(), tensor.raw_data(), Device(), host.data(),
                              host.size() * sizeof(T)));
      ASSERT_OK(devices::synchronize(tensor.device()));
    });
  }
  // Returns the elements; those of U8 and FP8 tensors as the integer value of their byte.
  Values get() const {
    Values values;
    visit_element(dtype, [&]<class T>(T) {
      std::vector<T> host(static_cast<size_t>(tensor.numel()));
      ASSERT_OK(devices::copy(Device(), host.data(), tensor.device(), tensor.raw_data(),
                              host.size() * sizeof(T)));
      ASSERT_OK(devices::synchronize(tensor.device()));
      for (const T& v : host) {
        if constexpr (std::is_integral_v<T>) {
          values.push_back(static_cast<double>(v));
        } else {
          values.push_back(numeric::to_double(v));
        }
      }
    });
    return values;
  }
  // Returns `n` elements from `first` on, as a tensor over the same memory.
  Tensor part(int64_t first, int64_t n) const {
    void* data =
        static_cast<char*>(tensor.raw_data()) + first * static_cast<int64_t>(bits(dtype)) / 8;
    return Tensor::wrap(data, std::span(&n, 1), {}, dtype, tensor.device(), nullptr).value();
  }
};

inline void expect_values(const OnGpu& got, const Values& want, const std::string& what) {
  const Values values = got.get();
  ASSERT_EQ(values.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) {
    const double expected =
        got.dtype == DType::kU8 || got.dtype == DType::kF8E4M3
            ? static_cast<double>(static_cast<uint8_t>(static_cast<int64_t>(want[i])))
            : want[i];
    if (std::isnan(expected) ? std::isnan(values[i]) : values[i] == expected) continue;
    FAIL() << what << ": element " << i << " is " << values[i] << ", must be " << expected;
  }
}

// Test cases for the collectives of one communicator.
class Cases {
 public:
  Cases(const Comm& comm, const CallOptions& options) : comm_(comm), options_(options) {}

  void all() {
    for (const DType d :
         {DType::kF32, DType::kF16, DType::kBF16, DType::kF64, DType::kI32, DType::kI64}) {
      for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{777}, int64_t{65536}}) {
        for (const int reduction : {TE_FL_REDUCTION_SUM, TE_FL_REDUCTION_MAX, TE_FL_REDUCTION_AVG})
          reductions(d, n, reduction);
      }
    }
    for (const DType d : {DType::kF32, DType::kBF16, DType::kF8E4M3, DType::kU8}) {
      for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{777}, int64_t{65536}}) copies(d, n);
    }
    ASSERT_OK(ops::barrier({.comm = comm_.c()}, options_));
    ASSERT_OK(devices::synchronize(comm_.device(), options_.stream));
  }

  void reductions(DType d, int64_t n, int reduction) {
    const bool integers = d == DType::kI32 || d == DType::kI64;
    if (integers && reduction == TE_FL_REDUCTION_AVG) return;
    const int64_t whole = n * comm_.size();
    Values want(static_cast<size_t>(whole));
    for (int64_t i = 0; i < whole; ++i) want[static_cast<size_t>(i)] = reduced(i, reduction);
    const std::string what = "reduction " + std::to_string(reduction) + " of " + std::to_string(n) +
                             " " + std::string(name(d));
    const Device& device = comm_.device();
    OnGpu input(device, d, rank_values(comm_.rank(), whole)), output(device, d, whole);
    ASSERT_OK(ops::all_reduce(
        {.input = input.tensor, .output = output.tensor, .comm = comm_.c(), .reduction = reduction},
        options_))
        << what;
    wait();
    expect_values(output, want, "all_reduce, " + what);
    expect_values(input, rank_values(comm_.rank(), whole), "all_reduce's input, " + what);
    OnGpu part(device, d, n);
    ASSERT_OK(ops::reduce_scatter(
        {.input = input.tensor, .output = part.tensor, .comm = comm_.c(), .reduction = reduction},
        options_))
        << what;
    wait();
    const Values own = slice(want, comm_.rank() * n, n);
    expect_values(part, own, "reduce_scatter, " + what);
    ASSERT_OK(ops::all_reduce(
        {.input = input.tensor, .output = input.tensor, .comm = comm_.c(), .reduction = reduction},
        options_))
        << what;
    wait();
    expect_values(input, want, "all_reduce in place, " + what);
  }

  // If one rank has a NaN, the maximum is NaN; if one has an infinity, the maximum is infinite.
  void maximum_of_nan(DType d) {
    const int last = comm_.size() - 1;
    Values mine = rank_values(comm_.rank(), 5), want;
    if (comm_.rank() == 0) mine[1] = std::nan("");
    if (comm_.rank() == last) mine[2] = -std::nan("");
    if (comm_.rank() == last) mine[3] = std::numeric_limits<double>::infinity();
    mine[4] = -std::numeric_limits<double>::infinity();
    for (int64_t i = 0; i < 5; ++i) want.push_back(reduced(i, TE_FL_REDUCTION_MAX));
    want[1] = want[2] = std::nan("");
    want[3] = std::numeric_limits<double>::infinity();
    want[4] = -want[3];
    OnGpu input(comm_.device(), d, mine), output(comm_.device(), d, 5);
    ASSERT_OK(ops::all_reduce({.input = input.tensor,
                               .output = output.tensor,
                               .comm = comm_.c(),
                               .reduction = TE_FL_REDUCTION_MAX},
                              options_));
    wait();
    expect_values(output, want, "maximum of NaN, " + std::string(name(d)));
  }

  void copies(DType d, int64_t n) {
    const int size = comm_.size(), rank = comm_.rank();
    const std::string what = std::to_string(n) + " " + std::string(name(d));
    const Device& device = comm_.device();
    OnGpu input(device, d, rank_values(rank, n)), whole(device, d, n * size);
    Values gathered;
    for (int r = 0; r < size; ++r) append(gathered, rank_values(r, n));
    ASSERT_OK(ops::all_gather({.input = input.tensor, .output = whole.tensor, .comm = comm_.c()},
                              options_))
        << what;
    wait();
    expect_values(whole, gathered, "all_gather, " + what);
    Values own(static_cast<size_t>(n * size), 0.0);
    for (int64_t i = 0; i < n; ++i) own[static_cast<size_t>(rank * n + i)] = rank_value(rank, i);
    whole.put(own);
    ASSERT_OK(ops::all_gather(
        {.input = whole.part(rank * n, n), .output = whole.tensor, .comm = comm_.c()}, options_))
        << what;
    wait();
    expect_values(whole, gathered, "all_gather in place, " + what);

    OnGpu parts(device, d, rank_values(rank, n * size));
    Values exchanged;
    for (int r = 0; r < size; ++r) append(exchanged, slice(rank_values(r, n * size), rank * n, n));
    ASSERT_OK(ops::all_to_all({.input = parts.tensor, .output = whole.tensor, .comm = comm_.c()},
                              options_))
        << what;
    wait();
    expect_values(whole, exchanged, "all_to_all, " + what);
    uneven(d, n);
    experts_rows(d, n);

    for (int root = 0; root < size; ++root) {
      OnGpu data(device, d, rank_values(rank, n));
      ASSERT_OK(ops::broadcast({.data = data.tensor, .comm = comm_.c(), .root = root}, options_));
      wait();
      expect_values(data, rank_values(root, n), "broadcast, " + what);
    }
    if (size > 1) to_neighbour(d, n);
  }

  // Rank r sends n + r + 2 s rows of three elements to rank s; rank 1 sends none to rank 0.
  void uneven(DType d, int64_t n) {
    const int size = comm_.size(), rank = comm_.rank();
    const auto rows = [&](int from, int to) {
      return from == 1 && to == 0 ? int64_t{0} : n + from + 2 * to;
    };
    const auto sent = [&](int from) {
      int64_t sum = 0;
      for (int to = 0; to < size; ++to) sum += rows(from, to);
      return sum;
    };
    std::vector<int64_t> in, out;
    Values want;
    for (int r = 0; r < size; ++r) {
      in.push_back(rows(rank, r));
      out.push_back(rows(r, rank));
      int64_t before = 0;
      for (int to = 0; to < rank; ++to) before += rows(r, to);
      append(want, slice(rank_values(r, 3 * sent(r)), 3 * before, 3 * rows(r, rank)));
    }
    OnGpu input(comm_.device(), d, rank_values(rank, 3 * sent(rank)));
    OnGpu output(comm_.device(), d, static_cast<int64_t>(want.size()));
    const Tensor input_rows = input.tensor.view({input.tensor.numel() / 3, 3}).value();
    const Tensor output_rows = output.tensor.view({output.tensor.numel() / 3, 3}).value();
    ASSERT_OK(ops::all_to_all_v({.input = input_rows,
                                 .output = output_rows,
                                 .comm = comm_.c(),
                                 .input_rows = in.data(),
                                 .input_rows_count = size,
                                 .output_rows = out.data(),
                                 .output_rows_count = size},
                                options_));
    wait();
    expect_values(output, want, "all_to_all_v of " + std::to_string(n));
  }

  // moe_dispatch and moe_combine with three experts on each rank: rank r has n + r + 2 e rows for
  // expert e of the job, and rank 1 none for expert 0. Each row has three equal elements, its
  // sender's number and its own number there. moe_combine must bring the rows back.
  void experts_rows(DType d, int64_t n) {
    constexpr int kExperts = 3;
    const int size = comm_.size(), rank = comm_.rank();
    const auto count = [&](int from, int e) {
      return from == 1 && e == 0 ? int64_t{0} : n / 64 + from + 2 * e;
    };
    const auto row = [&](Values& to, int from, int64_t number) {
      to.insert(to.end(), 3, rank_value(from, number));
    };
    std::vector<int64_t> sent, received;
    Values values, want;
    for (int e = 0; e < size * kExperts; ++e) {
      sent.push_back(count(rank, e));
      received.push_back(count(e / kExperts, rank * kExperts + e % kExperts));
    }
    const int64_t rows = std::accumulate(sent.begin(), sent.end(), int64_t{0});
    for (int64_t i = 0; i < rows; ++i) row(values, rank, i);
    for (int e = rank * kExperts; e < (rank + 1) * kExperts; ++e) {
      for (int from = 0; from < size; ++from) {
        int64_t before = 0;
        for (int other = 0; other < e; ++other) before += count(from, other);
        for (int64_t i = 0; i < count(from, e); ++i) row(want, from, before + i);
      }
    }
    const auto arrived = static_cast<int64_t>(want.size()) / 3;
    Values first, first_want;
    for (size_t i = 0; i < values.size(); i += 3) first.push_back(values[i]);
    for (size_t i = 0; i < want.size(); i += 3) first_want.push_back(want[i]);
    const Device& device = comm_.device();
    OnGpu input(device, d, values), output(device, d, 3 * arrived), back(device, d, 3 * rows);
    OnGpu probs(device, DType::kF32, first), output_probs(device, DType::kF32, arrived);
    OnGpu back_probs(device, DType::kF32, rows);
    const auto matrix = [](const OnGpu& t) {
      return t.tensor.view({t.tensor.numel() / 3, 3}).value();
    };
    const Tensor in = matrix(input), out = matrix(output), returned = matrix(back);
    const auto experts = static_cast<int64_t>(sent.size());
    ASSERT_OK(ops::moe_dispatch({.input = in,
                                 .probs = probs.tensor,
                                 .output = out,
                                 .output_probs = output_probs.tensor,
                                 .comm = comm_.c(),
                                 .input_rows = sent.data(),
                                 .input_rows_count = experts,
                                 .output_rows = received.data(),
                                 .output_rows_count = experts},
                                options_));
    ASSERT_OK(ops::moe_combine({.input = out,
                                .probs = output_probs.tensor,
                                .output = returned,
                                .output_probs = back_probs.tensor,
                                .comm = comm_.c(),
                                .input_rows = received.data(),
                                .input_rows_count = experts,
                                .output_rows = sent.data(),
                                .output_rows_count = experts},
                               options_));
    wait();
    const std::string what = " of " + std::to_string(n) + " " + std::string(name(d));
    expect_values(output, want, "moe_dispatch" + what);
    expect_values(output_probs, first_want, "moe_dispatch's probabilities" + what);
    expect_values(back, values, "moe_combine" + what);
    expect_values(back_probs, first, "moe_combine's probabilities" + what);
  }

  // Every rank sends to the next and receives from the previous one, which works only inside a
  // group.
  void to_neighbour(DType d, int64_t n) {
    const int size = comm_.size(), rank = comm_.rank();
    OnGpu input(comm_.device(), d, rank_values(rank, n)), output(comm_.device(), d, n);
    CommGroup group = std::move(CommGroup::begin(comm_)).value();
    ASSERT_OK(
        ops::send({.input = input.tensor, .comm = comm_.c(), .peer = (rank + 1) % size}, options_));
    ASSERT_OK(ops::recv(
        {.output = output.tensor, .comm = comm_.c(), .peer = (rank + size - 1) % size}, options_));
    ASSERT_OK(group.end());
    wait();
    expect_values(output, rank_values((rank + size - 1) % size, n), "send and recv");
  }

 private:
  static Values slice(const Values& v, int64_t first, int64_t n) {
    return Values(v.begin() + first, v.begin() + first + n);
  }
  static void append(Values& to, const Values& more) {
    to.insert(to.end(), more.begin(), more.end());
  }
  double reduced(int64_t i, int reduction) const {
    double v = rank_value(0, i);
    for (int r = 1; r < comm_.size(); ++r) {
      v = reduction == TE_FL_REDUCTION_MAX ? std::max(v, rank_value(r, i)) : v + rank_value(r, i);
    }
    return reduction == TE_FL_REDUCTION_AVG ? v / comm_.size() : v;
  }
  void wait() { ASSERT_OK(devices::synchronize(comm_.device(), options_.stream)); }

  const Comm& comm_;
  CallOptions options_;
};

}  // namespace te_fl::testing
