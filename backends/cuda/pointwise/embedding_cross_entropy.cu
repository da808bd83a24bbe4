// The embedding and cross-entropy ops.
#include "te_fl/ops/tensor.h"

#include <algorithm>

#include "common/overlap.hpp"
#include "common/store.cuh"
#include "common/value_checks.hpp"
#include "plugin/families.hpp"
#include "pointwise/embedding.cuh"
#include "pointwise/pointwise_choice.hpp"
#include "softmax/cross_entropy.cuh"
#include "te_fl/backend/describe.hpp"

namespace te_fl::cuda {
namespace {

using backend::invalid;

// Maximum rows and column parts per launch. A grid has less than 2^31 blocks (65536 in its second
// dimension), but a tensor may have more rows.
constexpr int64_t kMostRows = 1 << 18, kMostParts = 1 << 8;

// Calls f(first, count) for each launch over `size` rows or parts.
template <class F>
void in_launches(int64_t size, int64_t most, F&& f) {
  for (int64_t first = 0; first < size; first += most) {
    f(first, static_cast<unsigned>(std::min(size - first, most)));
  }
}

// ---- embedding, cross-entropy

// Records values outside [0, extent).
__global__ void range_kernel(Integers values, int64_t size, int64_t extent, bool has_ignored,
                             int64_t ignored, ValueErrorSink errors) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < size;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t v = values[i];
    if ((v >= 0 && v < extent) || (has_ignored && v == ignored)) continue;
    note(errors, has_ignored ? ValueRule::kTarget : ValueRule::kIndex, i, v, extent);
  }
}

void launch_range(const te_fl_context& ctx, const te_fl_tensor& values, int64_t extent,
                  const int64_t* ignored, const ValueErrorSink& errors) {
  const int64_t size = backend::numel(values);
  if (size == 0) return;
  range_kernel<<<blocks_for(size), kThreads, 0, stream_of(ctx)>>>(
      Integers(values), size, extent, ignored != nullptr, ignored != nullptr ? *ignored : 0,
      errors);
  check_launch("range_kernel");
}

// Returns the slot in which an op's kernels record values outside [0, extent); the kernels continue
// after such values. With TE_FL_VALIDATE, this function checks the values itself and throws before
// anything is written.
ValueErrorSink open_errors(const te_fl_context& ctx, const char* op, const te_fl_tensor& values,
                         int64_t extent, const int64_t* ignored = nullptr) {
  const ValueErrorSink errors = open_value_errors(ctx, op);
  if (!validates(ctx)) return errors;
  launch_range(ctx, values, extent, ignored, errors);
  refuse_noted(ctx);
  return errors;
}

struct Lookup {
  Source weight;
  Integers indices;
  int64_t rows, cols;
  ValueErrorSink errors;
  __device__ void operator()(int64_t row, int64_t col, int n, float* v) const {
    const int64_t index = indices[row];
    if (index >= 0 && index < rows) return weight.load(index * cols + col, n, v);
    if (col == 0) note(errors, ValueRule::kIndex, row, index, rows);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) v[i] = NAN;
  }
};
void embedding_fwd(const te_fl_context& ctx, const te_fl_embedding_fwd_args& args) {
  const backend::Matrix table = backend::as_matrix(*args.weight);
  const ValueErrorSink errors = open_errors(ctx, "embedding_fwd", *args.indices, table.rows);
  const auto* weight = backend::data<const uint4>(*args.weight);
  auto* output = backend::data<uint4>(*args.output);
  const int64_t row_bytes = table.cols * args.weight->dl.dtype.bits / 8;
  const int64_t words = backend::numel(*args.indices) * (row_bytes / 16);
  if (!choose_pointwise(args).aligned) {
    return store_output(
        ctx, *args.output,
        Lookup{Source(*args.weight), Integers(*args.indices), table.rows, table.cols, errors});
  }
  embedding_kernel<<<static_cast<unsigned>(ceil_div(words, 4 * kThreads)), kThreads, 0,
                     stream_of(ctx)>>>(weight, Integers(*args.indices), output, table.rows,
                                       FastDiv(row_bytes / 16), words, errors);
  check_launch("embedding_fwd");
}
Refusal refuse_embedding_fwd(const te_fl_embedding_fwd_args& args) {
  if (!all_dense(args.indices, args.weight, args.output)) return kNotContiguous;
  return overlaps(*args.output, *args.weight) ? kOverlaps : nullptr;
}

static_assert(pointwise_choice::kMostPositions == kFastDivLimit &&
              pointwise_choice::kPackElements == kGroup &&
              pointwise_choice::kBlockThreads == kThreads);

size_t embedding_bwd_workspace(const te_fl_context&, const te_fl_embedding_bwd_args& args) {
  if (!has_lists(args)) return 0;
  const int64_t words = backend::as_matrix(*args.grad_weight).rows + backend::numel(*args.indices);
  return static_cast<size_t>(words) * sizeof(int32_t);
}
void embedding_bwd(const te_fl_context& ctx, const te_fl_embedding_bwd_args& args) {
  const backend::Matrix table = backend::as_matrix(*args.grad_weight);
  const ValueErrorSink errors = open_errors(ctx, "embedding_bwd", *args.indices, table.rows);
  if (table.rows == 0 || table.cols == 0) return;
  const cudaStream_t stream = stream_of(ctx);
  const int64_t positions = backend::numel(*args.indices);
  RowSums sums{Integers(*args.indices),
               positions,
               nullptr,
               nullptr,
               Source(*args.grad_output),
               Source(*args.grad_weight),
               Target(*args.grad_weight),
               table.cols,
               args.accumulate != 0};
  if (has_lists(args)) {
    auto* heads = static_cast<int32_t*>(ctx.workspace);
    int32_t* next = heads + table.rows;
    check(cudaMemsetAsync(heads, 0xFF, static_cast<size_t>(table.rows) * sizeof *heads, stream),
          "cudaMemsetAsync");
    if (positions > 0) {
      link_kernel<<<static_cast<unsigned>(ceil_div(positions, kThreads)), kThreads, 0, stream>>>(
          sums.indices, positions, table.rows, heads, next, errors);
      check_launch("embedding_bwd");
    }
    sums.heads = heads, sums.next = next;
  } else {
    launch_range(ctx, *args.indices, table.rows, nullptr, errors);
  }
  const int64_t parts = ceil_div(table.cols, kThreads * kGroup);
  const auto across = static_cast<unsigned>(parts);
  in_launches(ceil_div(table.rows, kTableRows), ceil_div(kMostRows, 2 * parts),
              [&](int64_t first, unsigned groups) {
                embedding_gradient_kernel<<<groups * across, kThreads, 0, stream>>>(
                    sums, table.rows, across, first * kTableRows);
              });
  check_launch("embedding_bwd");
}
Refusal refuse_embedding_bwd(const te_fl_embedding_bwd_args& args) {
  if (!all_dense(args.indices, args.grad_output, args.grad_weight)) return kNotContiguous;
  return overlaps(*args.grad_weight, *args.grad_output) ? kOverlaps : nullptr;
}

void cross_entropy_fwd(const te_fl_context& ctx, const te_fl_cross_entropy_fwd_args& args) {
  const backend::Matrix matrix = backend::as_matrix(*args.logits);
  const ValueErrorSink errors =
      open_errors(ctx, "cross_entropy_fwd", *args.targets, matrix.cols, &args.ignore_index);
  if (matrix.rows == 0) return;
  with_type(dtype_of(*args.logits), [&]<class T>(T) {
    in_launches(matrix.rows, kMostRows, [&](int64_t first, unsigned rows) {
      cross_entropy_kernel<T><<<rows, kThreads, 0, stream_of(ctx)>>>(
          backend::data<const T>(*args.logits), Integers(*args.targets),
          backend::data<float>(*args.loss), backend::data<float>(*args.lse), matrix.cols,
          args.label_smoothing, args.ignore_index, first, errors);
    });
  });
  check_launch("cross_entropy_fwd");
}
Refusal refuse_cross_entropy_fwd(const te_fl_cross_entropy_fwd_args& args) {
  return all_dense(args.logits, args.targets, args.loss, args.lse) ? nullptr : kNotContiguous;
}

void cross_entropy_bwd(const te_fl_context& ctx, const te_fl_cross_entropy_bwd_args& args) {
  const backend::Matrix matrix = backend::as_matrix(*args.logits);
  const ValueErrorSink errors =
      open_errors(ctx, "cross_entropy_bwd", *args.targets, matrix.cols, &args.ignore_index);
  if (matrix.rows == 0 || matrix.cols == 0) return;
  const LossGradient gradient{Integers(*args.targets),
                              backend::data<const float>(*args.grad_loss),
                              backend::data<const float>(*args.lse),
                              matrix.cols,
                              args.label_smoothing,
                              args.ignore_index,
                              errors};
  with_type(dtype_of(*args.logits), [&]<class T>(T) {
    const T* x = backend::data<const T>(*args.logits);
    T* dx = backend::data<T>(*args.grad_logits);
    // The number of packs per row.
    const int64_t packs = count_runs(x, matrix.cols) * kGroup / Pack<T>::kSize;
    const auto launch = [&]<int kPacks>(std::integral_constant<int, kPacks>) {
      const int64_t parts = ceil_div(packs, int64_t{kPacks} * kThreads);
      const int each = static_cast<int>(ceil_div(packs, parts));
      in_launches(parts, kMostParts, [&](int64_t first_part, unsigned columns) {
        in_launches(matrix.rows, kMostRows, [&](int64_t first, unsigned rows) {
          cross_entropy_gradient_kernel<T, kPacks>
              <<<dim3(rows, columns), kThreads, 0, stream_of(ctx)>>>(x, dx, gradient, each, first,
                                                                     first_part);
        });
      });
    };
    if (choose_pointwise(args).packs == 1) return launch(std::integral_constant<int, 1>{});
    launch(std::integral_constant<int, 4>{});
  });
  check_launch("cross_entropy_bwd");
}
Refusal refuse_cross_entropy_bwd(const te_fl_cross_entropy_bwd_args& args) {
  if (!all_dense(args.logits, args.targets, args.grad_loss, args.lse, args.grad_logits)) {
    return kNotContiguous;
  }
  return overlaps_askew(*args.grad_logits, *args.logits) ? kOverlaps : nullptr;
}

template <class Args>
std::string words_of_loss(const te_fl_context&, const Args& a) {
  return "kernel " + choose_pointwise(a).text();
}
template <class Args, auto F, auto Refuses>
void append_loss(std::vector<te_fl_op_desc>& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().describe = backend::describe_thunk<Args, words_of_loss<Args>>;
}

}  // namespace

void append_tensor(std::vector<te_fl_op_desc>& ops) {
  append_copies(ops);
  append_fills(ops);
  append_loss<te_fl_embedding_fwd_args, embedding_fwd, refuse_embedding_fwd>(ops, "embedding_fwd");
  ops.back().workspace = [](void*, const te_fl_context*, const void*, size_t* bytes) {
    *bytes = kStoreWorkspace;
    return te_fl_status{TE_FL_OK};
  };
  append_loss<te_fl_embedding_bwd_args, embedding_bwd, refuse_embedding_bwd>(ops, "embedding_bwd");
  ops.back().workspace =
      backend::workspace_thunk<te_fl_embedding_bwd_args, embedding_bwd_workspace>;
  append_loss<te_fl_cross_entropy_fwd_args, cross_entropy_fwd, refuse_cross_entropy_fwd>(
      ops, "cross_entropy_fwd");
  append_loss<te_fl_cross_entropy_bwd_args, cross_entropy_bwd, refuse_cross_entropy_bwd>(
      ops, "cross_entropy_bwd");
}

}  // namespace te_fl::cuda
