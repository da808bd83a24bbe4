// The op moe_permute_by_mask_fwd: copies each token to the rows of the experts that a mask selects
// for it.
#include "common/overlap.hpp"
#include "common/value_checks.hpp"
#include "moe/kernel_names.hpp"
#include "moe/mask_pairs.cuh"
#include "moe/scatter_rows.cuh"
#include "plugin/families.hpp"
#include "te_fl/ops/moe.h"

namespace te_fl::cuda {
namespace {

using Args = te_fl_moe_permute_by_mask_fwd_args;

size_t workspace(const te_fl_context&, const Args& a) {
  const MaskPairs m(*a.routing_map, nullptr);
  return static_cast<size_t>(m.experts) * static_cast<size_t>(m.tiles) * sizeof(uint32_t);
}

void zero(const te_fl_tensor* t, cudaStream_t stream) {
  if (t == nullptr || backend::numel(*t) == 0) return;
  const auto bytes = static_cast<size_t>(backend::numel(*t) * (t->dl.dtype.bits / 8));
  check(cudaMemsetAsync(backend::data<void>(*t), 0, bytes, stream), "cudaMemsetAsync");
}

void moe_permute_by_mask_fwd(const te_fl_context& ctx, const Args& a) {
  const int64_t rows = a.output->dl.shape[0], bytes = row_bytes_of(*a.input);
  const cudaStream_t stream = stream_of(ctx);
  const MaskPairs pairs(*a.routing_map, ctx.workspace);
  if (pairs.experts == 0) return zero(a.output, stream), zero(a.permuted_probs, stream);
  const bool has_probs = a.probs != nullptr, pads = a.pad_offsets != nullptr;
  const MaskedRows out{pads ? backend::data<const void>(*a.pad_offsets) : nullptr,
                       pads && dtype_of(*a.pad_offsets) == TE_FL_I64,
                       has_probs ? backend::data<const void>(*a.probs) : nullptr,
                       has_probs ? backend::data<void>(*a.permuted_probs) : nullptr,
                       has_probs ? a.probs->dl.dtype.bits / 8 : 0,
                       backend::data<int32_t>(*a.row_id_map),
                       rows,
                       open_value_errors(ctx, "moe_permute_by_mask_fwd")};
  const auto experts = static_cast<size_t>(pairs.experts);
  const auto tiles = static_cast<unsigned>(pairs.tiles);
  if (tiles > 0) {
    count_masked_kernel<<<tiles, kThreads, experts * sizeof(uint32_t), stream>>>(pairs);
    check_launch("count_masked_kernel");
  }
  const size_t shared = experts * (sizeof(int64_t) + 2 * sizeof(uint32_t));
  with_word(word_bytes(bytes, *a.output, *a.output), [&]<class Word>(Word) {
    const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
    Word* const output = backend::data<Word>(*a.output);
    if (validates(ctx)) {
      place_masked_kernel<Word, true>
          <<<std::max(tiles, 1u), kPlaceThreads, shared, stream>>>(pairs, out, output, words);
      check_launch("place_masked_kernel");
      refuse_noted(ctx);
    }
    place_masked_kernel<Word, false>
        <<<tiles + kGapBlocks, kPlaceThreads, shared, stream>>>(pairs, out, output, words);
    check_launch("place_masked_kernel");
  });
  scatter_rows(ctx, "moe_permute_by_mask_fwd", *a.input, *a.row_id_map, *a.output,
               {out.probs, out.prob_bytes});
}

Refusal refuse(const Args& a) {
  if (!all_dense(a.input, a.routing_map, a.probs, a.pad_offsets, a.output, a.permuted_probs,
                 a.row_id_map)) {
    return kNotContiguous;
  }
  const bool meets = overlaps(*a.output, *a.input) ||
                     (a.probs != nullptr && overlaps(*a.permuted_probs, *a.probs));
  if (meets) return kOverlaps;
  if (a.routing_map->dl.shape[1] > kMostMasked) return "takes up to 2048 experts";
  return refuse_wide(a.input);
}

}  // namespace

void append_permute_by_mask(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<Args, moe_permute_by_mask_fwd, refuse>("moe_permute_by_mask_fwd"));
  ops.back().describe = describe_by<Args, "kernels count_masked, place_masked and scatter_rows">;
  ops.back().workspace = backend::workspace_thunk<Args, workspace>;
}

}  // namespace te_fl::cuda
