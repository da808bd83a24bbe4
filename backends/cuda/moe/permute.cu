// Ops that permute tokens by expert, pad groups of rows, and compute offsets from splits.
#include <algorithm>

#include "common/overlap.hpp"
#include "common/value_checks.hpp"
#include "device/device_attributes.hpp"
#include "moe/kernel_names.hpp"
#include "moe/listed_rows.cuh"
#include "moe/row_launch.cuh"
#include "moe/rows.cuh"
#include "moe/scatter_rows.cuh"
#include "moe/sort_pairs.cuh"
#include "plugin/families.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::cuda {
namespace {

// ---- permutation

size_t permute_workspace(const te_fl_context&, const te_fl_moe_permute_fwd_args& a) {
  const int64_t pairs = backend::numel(*a.indices);
  return pairs < kFastDivLimit ? 2 * static_cast<size_t>(pairs) * sizeof(int32_t) : 0;
}

void sort_pairs(const te_fl_context& ctx, const PairIndices& in, const PairRows& out) {
  cudaLaunchConfig_t config{};
  config.gridDim = 1;
  config.blockDim = kSortThreads;
  config.stream = stream_of(ctx);
  if (compute_capability(ctx.device.index) < 90) {
    check(cudaLaunchKernelEx(&config, sort_pairs_kernel<1>, in, out), "sort_pairs_kernel");
    return;
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = config.gridDim.x = kSortBlocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, sort_pairs_kernel<kSortBlocks>, in, out), "sort_pairs_kernel");
}

void moe_permute_fwd(const te_fl_context& ctx, const te_fl_moe_permute_fwd_args& a) {
  const int64_t tokens = a.indices->dl.shape[0], each = a.indices->dl.shape[1];
  const int64_t pairs = tokens * each, rows = a.output->dl.shape[0];
  const int64_t bytes = row_bytes_of(*a.input);
  const cudaStream_t stream = stream_of(ctx);
  if (pairs > 0) {
    const PairIndices in{Integers(*a.indices), pairs, a.num_experts,
                         open_value_errors(ctx, "moe_permute_fwd")};
    if (validates(ctx)) {
      check_experts_kernel<<<blocks_for(pairs), kThreads, 0, stream>>>(in);
      check_launch("check_experts_kernel");
      refuse_noted(ctx);
    }
    sort_pairs(ctx, in,
               {static_cast<int32_t*>(ctx.workspace), backend::data<int32_t>(*a.row_id_map), pairs,
                FastDiv(each), tokens, rows});
  }
  scatter_rows(ctx, "moe_permute_fwd", *a.input, *a.row_id_map, *a.output);
  if (rows <= pairs || bytes == 0) return;
  check(cudaMemsetAsync(backend::data<char>(*a.output) + pairs * bytes, 0,
                        static_cast<size_t>((rows - pairs) * bytes), stream),
        "cudaMemsetAsync");
}
Refusal refuse_permute_fwd(const te_fl_moe_permute_fwd_args& a) {
  if (!all_dense(a.input, a.indices, a.output, a.row_id_map)) return kNotContiguous;
  if (overlaps(*a.output, *a.input)) return kOverlaps;
  return refuse_wide(a.input);
}

// ---- sums

PermutedRows permuted_rows(const te_fl_context& ctx, const char* op, const te_fl_tensor& map,
                           const te_fl_tensor* probs, int64_t rows) {
  return {backend::data<const int32_t>(map),
          probs != nullptr ? backend::data<const float>(*probs) : nullptr,
          map.dl.shape[1],
          map.dl.shape[0],
          rows,
          open_value_errors(ctx, op)};
}

// Returns the number of threads for a block that processes a row of `cols` elements, `size`
// elements per thread at once.
unsigned threads_of_row(int64_t cols, int size) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(round_up(ceil_div(cols, size), 32), 32, kThreads));
}
// Calls f(first token, blocks) for each launch; a launch has one block per token.
template <class F>
void for_tokens(int64_t tokens, F&& f) {
  constexpr int64_t kMostTokens = 1 << 22;
  for (int64_t first = 0; first < tokens; first += kMostTokens) {
    f(first, static_cast<unsigned>(std::min(kMostTokens, tokens - first)));
  }
}
void sum_rows(const te_fl_context& ctx, const char* op, const te_fl_tensor& input,
              const te_fl_tensor& map, const te_fl_tensor* probs, const te_fl_tensor& output) {
  const PermutedRows rows = permuted_rows(ctx, op, map, probs, input.dl.shape[0]);
  const cudaStream_t stream = stream_of(ctx);
  const int64_t cols = output.dl.shape[1], pairs = backend::numel(map);
  const RowChoice choice = choose_row_sum(input, map, output);
  if (validates(ctx) && pairs > 0) {
    check_rows_kernel<<<blocks_for(pairs), kThreads, 0, stream>>>(rows.map, pairs, rows.rows,
                                                                  rows.errors);
    check_launch("check_rows_kernel");
    refuse_noted(ctx);
  }
  with_type(dtype_of(input), [&]<class T>(T) {
    const auto launch = [&]<bool kWhole>(std::bool_constant<kWhole>) {
      const int64_t pieces = ceil_div(cols, RowPiece<T, kWhole>::kSize);
      if (choice.kernel == RowChoice::kSumListed) {
        return for_pieces(0, rows.tokens, ceil_div(pieces, 64), [&](const RowPieces& p) {
          const auto most = static_cast<unsigned>(4 * multiprocessors(ctx.device.index));
          sum_listed_rows_kernel<T, kWhole>
              <<<std::min(block_count(p.size, kThreads / 32), most), kThreads, 0, stream>>>(
                  backend::data<const T>(input), rows, backend::data<T>(output), p, cols);
          check_launch(op);
        });
      }
      for_pieces(0, rows.tokens, pieces, [&](const RowPieces& p) {
        sum_rows_kernel<T, kWhole><<<block_count(p.size, kThreads), kThreads, 0, stream>>>(
            backend::data<const T>(input), rows, backend::data<T>(output), p);
        check_launch(op);
      });
    };
    if (choice.whole) return launch(std::true_type{});
    launch(std::false_type{});
  });
}

void moe_permute_bwd(const te_fl_context& ctx, const te_fl_moe_permute_bwd_args& a) {
  sum_rows(ctx, "moe_permute_bwd", *a.grad_output, *a.row_id_map, a.probs, *a.grad_input);
}
std::string permute_bwd_words(const te_fl_context&, const te_fl_moe_permute_bwd_args& a) {
  return "kernel " + choose_row_sum(*a.grad_output, *a.row_id_map, *a.grad_input).text();
}
Refusal refuse_permute_bwd(const te_fl_moe_permute_bwd_args& a) {
  if (!all_dense(a.grad_output, a.row_id_map, a.probs, a.grad_input)) return kNotContiguous;
  if (overlaps(*a.grad_input, *a.grad_output)) return kOverlaps;
  return refuse_wide(a.grad_input);
}
void moe_unpermute_fwd(const te_fl_context& ctx, const te_fl_moe_unpermute_fwd_args& a) {
  sum_rows(ctx, "moe_unpermute_fwd", *a.input, *a.row_id_map, a.probs, *a.output);
}
std::string unpermute_fwd_words(const te_fl_context&, const te_fl_moe_unpermute_fwd_args& a) {
  return "kernel " + choose_row_sum(*a.input, *a.row_id_map, *a.output).text();
}
Refusal refuse_unpermute_fwd(const te_fl_moe_unpermute_fwd_args& a) {
  if (!all_dense(a.input, a.row_id_map, a.probs, a.output)) return kNotContiguous;
  if (overlaps(*a.output, *a.input)) return kOverlaps;
  return refuse_wide(a.output);
}

// ---- gradient of permuted rows

size_t unpermute_bwd_workspace(const te_fl_context&, const te_fl_moe_unpermute_bwd_args& a) {
  return static_cast<size_t>(ceil_div(a.grad_input->dl.shape[0], 32)) * sizeof(uint32_t);
}

void moe_unpermute_bwd(const te_fl_context& ctx, const te_fl_moe_unpermute_bwd_args& a) {
  const int64_t rows = a.grad_input->dl.shape[0], cols = a.grad_input->dl.shape[1];
  const PermutedRows m = permuted_rows(ctx, "moe_unpermute_bwd", *a.row_id_map, a.probs, rows);
  const cudaStream_t stream = stream_of(ctx);
  const int64_t pairs = m.tokens * m.each;
  auto* bits = static_cast<uint32_t*>(ctx.workspace);
  if (rows > 0) {
    check(cudaMemsetAsync(bits, 0, unpermute_bwd_workspace(ctx, a), stream), "cudaMemsetAsync");
  }
  if (pairs > 0) {
    mark_rows_kernel<<<blocks_for(pairs), kThreads, 0, stream>>>(m.map, pairs, rows, bits,
                                                                 m.errors);
    check_launch("mark_rows_kernel");
    if (validates(ctx)) refuse_noted(ctx);
  }
  auto* grad_probs = a.grad_probs != nullptr ? backend::data<float>(*a.grad_probs) : nullptr;
  const RowChoice choice = choose_row_gradient(a);
  with_type(dtype_of(*a.grad_output), [&]<class T>(T) {
    T* grad_input = backend::data<T>(*a.grad_input);
    if (rows > 0 && cols > 0) {
      zero_rows_kernel<T><<<blocks_for(rows), kThreads, 0, stream>>>(bits, rows, cols, grad_input);
      check_launch("zero_rows_kernel");
    }
    if (choice.kernel == RowChoice::kScatter)
      return scatter_rows(ctx, "moe_unpermute_bwd", *a.grad_output, *a.row_id_map, *a.grad_input);
    const auto launch = [&]<bool kWhole>(std::bool_constant<kWhole>) {
      const unsigned threads = threads_of_row(cols, RowPiece<T, kWhole>::kSize);
      const bool few = choice.kernel == RowChoice::kFewGradient;
      const auto kernel =
          few ? few_rows_gradient_kernel<T, kWhole> : unpermute_gradient_kernel<T, kWhole>;
      size_t shared = few ? 0 : row_list_bytes(m.each);
      if (grad_probs != nullptr) shared += static_cast<size_t>(m.each) * (threads / 32) * 4;
      for_tokens(m.each > 0 ? m.tokens : 0, [&](int64_t first, unsigned blocks) {
        kernel<<<blocks, threads, shared, stream>>>(backend::data<const T>(*a.grad_output),
                                                    backend::data<const T>(*a.fwd_input), m,
                                                    grad_input, grad_probs, cols, first);
        check_launch("moe_unpermute_bwd");
      });
    };
    if (choice.whole) return launch(std::true_type{});
    launch(std::false_type{});
  });
}

std::string unpermute_bwd_words(const te_fl_context&, const te_fl_moe_unpermute_bwd_args& a) {
  return "kernels mark_rows, zero_rows and " + choose_row_gradient(a).text();
}

Refusal refuse_unpermute_bwd(const te_fl_moe_unpermute_bwd_args& a) {
  if (!all_dense(a.grad_output, a.fwd_input, a.row_id_map, a.probs, a.grad_input, a.grad_probs)) {
    return kNotContiguous;
  }
  if (overlaps(*a.grad_input, *a.grad_output) || overlaps(*a.grad_input, *a.fwd_input)) {
    return kOverlaps;
  }
  return a.row_id_map->dl.shape[0] > kMostListed ? "takes up to 1024 experts of a token" : nullptr;
}

// ---- groups

// Row counts of each group before (`plain`) and after padding (`padded`).
struct PaddedGroups {
  const int64_t* plain;
  const int64_t* padded;
  int64_t count;
};

void copy_groups(const te_fl_context& ctx, const char* op, const PaddedGroups& groups,
                 const te_fl_tensor& input, const te_fl_tensor& output, bool pads) {
  const int64_t bytes = row_bytes_of(input);
  int64_t from = 0, to = 0;
  for (int64_t g = 0; g < groups.count;) {
    RowGroups part;
    const int64_t first = to;
    for (; g < groups.count && part.count < kGroups; ++g) {
      const int64_t rows_out = pads ? groups.padded[g] : groups.plain[g];
      if (rows_out > 0) {
        part.from[part.count] = from, part.to[part.count] = to;
        part.rows[part.count++] = groups.plain[g];
      }
      from += pads ? groups.plain[g] : groups.padded[g], to += rows_out;
    }
    if (part.count == 0) continue;
    with_word(word_bytes(bytes, input, output), [&]<class Word>(Word) {
      const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
      for_pieces(first, to - first, words, [&](const RowPieces& p) {
        copy_groups_kernel<<<block_count(p.size, kThreads * kAtOnce), kThreads, 0, stream_of(ctx)>>>(
            backend::data<const Word>(input), backend::data<Word>(output), part, p);
        check_launch(op);
      });
    });
  }
}

void fused_multi_row_padding(const te_fl_context& ctx,
                             const te_fl_fused_multi_row_padding_args& a) {
  const PaddedGroups groups{a.input_rows, a.padded_rows, a.input_rows_count};
  copy_groups(ctx, "fused_multi_row_padding", groups, *a.input, *a.output, true);
}
void fused_multi_row_unpadding(const te_fl_context& ctx,
                               const te_fl_fused_multi_row_unpadding_args& a) {
  const PaddedGroups groups{a.unpadded_rows, a.input_rows, a.input_rows_count};
  copy_groups(ctx, "fused_multi_row_unpadding", groups, *a.input, *a.output, false);
}
template <class Args>
Refusal refuse_groups(const Args& a) {
  if (!all_dense(a.input, a.output)) return kNotContiguous;
  if (overlaps(*a.output, *a.input)) return kOverlaps;
  return refuse_wide(a.input);
}

// ---- offsets

void splits_to_offsets(const te_fl_context& ctx, const te_fl_splits_to_offsets_args& a) {
  const int64_t size = backend::numel(*a.splits);
  const Integers splits(*a.splits);
  const ValueErrorSink errors = open_value_errors(ctx, "splits_to_offsets");
  const cudaStream_t stream = stream_of(ctx);
  if (validates(ctx) && size > 0) {
    check_splits_kernel<<<blocks_for(size), kThreads, 0, stream>>>(splits, size, errors);
    check_launch("check_splits_kernel");
    refuse_noted(ctx);
  }
  const auto stride = static_cast<uint64_t>(a.stride);
  const auto launch = [&]<class Out>(Out* out) {
    offsets_kernel<<<1, kScanThreads, 0, stream>>>(splits, size, stride, a.leading_zero != 0, out,
                                                   errors);
  };
  if (dtype_of(*a.offsets) == TE_FL_I64) {
    launch(backend::data<int64_t>(*a.offsets));
  } else {
    launch(backend::data<int32_t>(*a.offsets));
  }
  check_launch("splits_to_offsets");
}
Refusal refuse_offsets(const te_fl_splits_to_offsets_args& a) {
  if (!all_dense(a.splits, a.offsets)) return kNotContiguous;
  return overlaps(*a.offsets, *a.splits) ? kOverlaps : nullptr;
}

}  // namespace

void append_moe(std::vector<te_fl_op_desc>& ops) {
  using Permute = te_fl_moe_permute_fwd_args;
  using UnpermuteGradient = te_fl_moe_unpermute_bwd_args;
  using Padding = te_fl_fused_multi_row_padding_args;
  using Unpadding = te_fl_fused_multi_row_unpadding_args;
  ops.push_back(descriptor<Permute, moe_permute_fwd, refuse_permute_fwd>("moe_permute_fwd"));
  ops.back().describe = describe_by<Permute, "kernels sort_pairs and scatter_rows">;
  ops.back().workspace = backend::workspace_thunk<Permute, permute_workspace>;
  ops.push_back(descriptor<te_fl_moe_permute_bwd_args, moe_permute_bwd, refuse_permute_bwd>(
      "moe_permute_bwd"));
  ops.back().describe = backend::describe_thunk<te_fl_moe_permute_bwd_args, permute_bwd_words>;
  ops.push_back(descriptor<te_fl_moe_unpermute_fwd_args, moe_unpermute_fwd, refuse_unpermute_fwd>(
      "moe_unpermute_fwd"));
  ops.back().describe = backend::describe_thunk<te_fl_moe_unpermute_fwd_args, unpermute_fwd_words>;
  ops.push_back(
      descriptor<UnpermuteGradient, moe_unpermute_bwd, refuse_unpermute_bwd>("moe_unpermute_bwd"));
  ops.back().describe = backend::describe_thunk<UnpermuteGradient, unpermute_bwd_words>;
  ops.back().workspace = backend::workspace_thunk<UnpermuteGradient, unpermute_bwd_workspace>;
  ops.push_back(descriptor<Padding, fused_multi_row_padding, refuse_groups<Padding>>(
      "fused_multi_row_padding"));
  ops.back().describe = describe_by<Padding, "kernel copy_groups">;
  ops.push_back(descriptor<Unpadding, fused_multi_row_unpadding, refuse_groups<Unpadding>>(
      "fused_multi_row_unpadding"));
  ops.back().describe = describe_by<Unpadding, "kernel copy_groups">;
  ops.push_back(descriptor<te_fl_splits_to_offsets_args, splits_to_offsets, refuse_offsets>(
      "splits_to_offsets"));
  ops.back().describe = describe_by<te_fl_splits_to_offsets_args, "kernel offsets">;
}

}  // namespace te_fl::cuda
