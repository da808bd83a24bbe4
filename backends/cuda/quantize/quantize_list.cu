// Quantisation of lists of tensors. One launch of a tile kernel processes all tensors of a kind
// (QuantizeKind); tensors that the tile kernels do not support are processed one by one.
#include "quantize/quantize.cuh"
#include "te_fl/ops/quantize.h"

namespace te_fl::cuda {
namespace {

// One tensor of a list, as part of the kernel parameters.
struct Item {
  const char* input;
  Quantised q;
  unsigned first_block;
  bool is_half;
};
constexpr int kFew = 24, kMany = 216;  // items per launch: as many as fit 4 KB of parameters, and
                                       // nearly 32 KB
template <int kCapacity>
struct Items {
  Item items[kCapacity];
  int count;
  unsigned blocks;
  bool backwards;
};

constexpr int block_threads(QuantizeCodes codes) {
  return codes == QuantizeCodes::kBlock ? kBlockThreads : kThreads;
}
// The number of blocks that a multiprocessor runs at once.
constexpr int resident_blocks(QuantizeCodes codes, int bytes) {
  return codes == QuantizeCodes::kBlock || (codes == QuantizeCodes::kMxfp8 && bytes == 4) ? 2 : 3;
}

template <int kBytes, QuantizeCodes kCodes, int kCapacity>
__global__ void __launch_bounds__(block_threads(kCodes), resident_blocks(kCodes, kBytes))
    list_kernel(const __grid_constant__ Items<kCapacity> list) {
  const unsigned block = list.backwards ? list.blocks - 1 - blockIdx.x : blockIdx.x;
  int which = 0;
  for (int below = list.count - 1; which < below;) {
    const int middle = (which + below + 1) / 2;
    if (list.items[middle].first_block <= block) {
      which = middle;
    } else {
      below = middle - 1;
    }
  }
  const Item& item = list.items[which];
  if (item.q.skip()) return;
  TileSources<1> in;
  in.base[0] = item.input;
  in.row_bytes[0] = item.q.k * kBytes;
  in.is_half = item.is_half;
  constexpr bool kMxfp8 = kCodes == QuantizeCodes::kMxfp8;
  constexpr int kCols = kMxfp8                            ? kMxfp8Cols
                        : kCodes == QuantizeCodes::kBlock ? kBlockTile
                                                          : kTileCols;
  const int64_t row_tiles =
      kMxfp8 ? mxfp8_padded_rows(item.q.m) / kMxfp8Rows : (item.q.m + kTileRows - 1) / kTileRows;
  TileGrid g;
  g.rows = item.q.m;
  g.cols = item.q.k;
  g.row_steps = static_cast<unsigned>(row_tiles);
  g.col_tiles = static_cast<unsigned>((item.q.k + kCols - 1) / kCols);
  g.each = 1;
  g.backwards = false;
  const unsigned own = block - item.first_block;
  if constexpr (kMxfp8) {
    quantise_mxfp8<kBytes, false>(in, g, item.q, nullptr, own);
  } else if constexpr (kCodes == QuantizeCodes::kBlock && kBytes == 2) {
    copy_blocks(in, g, item.q, own);
  } else if constexpr (kCodes == QuantizeCodes::kBlock) {
    quantise_blocks<Copy, kBytes, false>(in, g, item.q, Copy{}, nullptr, own);
  } else {
    quantise_tiles<Copy, kBytes, false>(in, g, item.q, Copy{}, {}, own);
  }
}

template <int kBytes, int kCapacity>
auto find_kernel(QuantizeCodes codes) {
  switch (codes) {
    case QuantizeCodes::kBlock:
      return list_kernel<kBytes, QuantizeCodes::kBlock, kCapacity>;
    case QuantizeCodes::kMxfp8:
      return list_kernel<kBytes, QuantizeCodes::kMxfp8, kCapacity>;
    default:
      return list_kernel<kBytes, QuantizeCodes::kTensor, kCapacity>;
  }
}
template <int kCapacity>
void launch(const te_fl_context& ctx, const Items<kCapacity>& list, const QuantizeKind& kind) {
  const auto kernel =
      kind.is_f32 ? find_kernel<4, kCapacity>(kind.codes) : find_kernel<2, kCapacity>(kind.codes);
  kernel<<<list.blocks, block_threads(kind.codes), 0, stream_of(ctx)>>>(list);
  check_launch("list_kernel");
}

template <int kCapacity>
class Launcher {
 public:
  Launcher(const te_fl_context& ctx, const QuantizeKind& kind) : ctx_(ctx), kind_(kind) {}
  // `found`: address of the item's amax for current scaling.
  void add(const QuantizePair& pair, const float* noop, float* found) {
    const Elementwise<Copy> op = make_copy(*pair.input, pair.first_row, *pair.output);
    const int dtype = op.in[0].source.dtype;
    Item& item = list_.items[list_.count];
    item.input = static_cast<const char*>(op.in[0].source.data) + op.in[0].first * bytes_of(dtype);
    item.q = quantised(*pair.output, noop, largest_finite_of(dtype));
    if (kind_.codes != QuantizeCodes::kTensor) clear_amax(ctx_, item.q);
    item.q.measure = kind_.compute_scale;
    item.q.running_amax = kind_.compute_scale ? found : item.q.amax;
    item.is_half = dtype == TE_FL_F16;
    item.first_block = list_.blocks;
    const TileGrid g = codes_grid(item.q.scaling, item.q.m, item.q.k, false);
    // Starts a new launch before the number of blocks exceeds 2^31, which is rare.
    const int64_t blocks = int64_t{g.row_steps} * g.col_tiles;
    if (list_.blocks + blocks > INT32_MAX) {
      flush();
      return add(pair, noop, found);
    }
    list_.blocks += static_cast<unsigned>(blocks);
    if (++list_.count == kCapacity) flush();
  }
  void flush() {
    if (list_.count > 0) run();
    list_.count = 0;
    list_.blocks = 0;
  }

 private:
  void run() {
    list_.backwards = false;
    launch(ctx_, list_, kind_);
    if (!kind_.compute_scale) return;
    for (int i = 0; i < list_.count; ++i) {
      Quantised& q = list_.items[i].q;
      q.measure = false;
      q.found = q.running_amax;
      q.running_amax = nullptr;
    }
    list_.backwards = true;
    launch(ctx_, list_, kind_);
  }

  const te_fl_context& ctx_;
  QuantizeKind kind_;
  Items<kCapacity> list_{};
};

template <int kCapacity, class Pairs>
void quantise_kind(const te_fl_context& ctx, size_t kind, int64_t count, Pairs& pair_of,
                   const float* noop) {
  auto* found = reinterpret_cast<float*>(static_cast<char*>(ctx.workspace) + kStoreWorkspace);
  Launcher<kCapacity> launcher(ctx, kQuantizeKinds[kind]);
  for (int64_t i = 0; i < count; ++i) {
    const QuantizePair pair = pair_of(i);
    if (quantize_kind(pair) == kind) launcher.add(pair, noop, found + i);
  }
  launcher.flush();
}

// Quantises every pair, with as few launches per kind as possible.
template <class Pairs>
void quantise_list(const te_fl_context& ctx, int64_t count, Pairs pair_of, const float* noop) {
  const QuantizeListChoice choice = choose_quantize_list(count, pair_of);
  for (int64_t i = 0; choice.alone > 0 && i < count; ++i) {
    const QuantizePair pair = pair_of(i);
    if (quantize_kind(pair) < kQuantizeKinds.size()) continue;
    quantize_rows(ctx, *pair.input, pair.first_row, *pair.output, noop);
  }
  bool finds_scales = false;
  for (size_t k = 0; k < kQuantizeKinds.size(); ++k) {
    finds_scales |= kQuantizeKinds[k].compute_scale && choice.members[k] > 0;
  }
  if (finds_scales) {
    check(cudaMemsetAsync(static_cast<char*>(ctx.workspace) + kStoreWorkspace, 0,
                          static_cast<size_t>(count) * sizeof(float), stream_of(ctx)),
          "cudaMemsetAsync");
  }
  for (size_t k = 0; k < kQuantizeKinds.size(); ++k) {
    if (choice.members[k] == 0) continue;
    if (choice.members[k] <= kFew) {
      quantise_kind<kFew>(ctx, k, count, pair_of, noop);
    } else {
      quantise_kind<kMany>(ctx, k, count, pair_of, noop);
    }
  }
}

void multi_tensor_quantize(const te_fl_context& ctx, const te_fl_multi_tensor_quantize_args& args) {
  quantise_list(ctx, args.outputs_count, make_pairs(args), find_noop(args.noop_flag));
}
Refusal refuse_multi_tensor_quantize(const te_fl_multi_tensor_quantize_args& args) {
  if (any_overlap(args.outputs, args.outputs_count, args.inputs, args.inputs_count)) {
    return kInPlace;
  }
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    if (const Refusal why = refuse_pair(*args.inputs[i], *args.outputs[i])) return why;
  }
  return nullptr;
}

void split_quantize(const te_fl_context& ctx, const te_fl_split_quantize_args& args) {
  quantise_list(ctx, args.outputs_count, make_pairs(args), nullptr);
}
Refusal refuse_split_quantize(const te_fl_split_quantize_args& args) {
  for (int64_t i = 0; i < args.outputs_count; ++i) {
    if (const Refusal why = refuse_pair(*args.input, *args.outputs[i])) return why;
  }
  return nullptr;
}

template <class Args>
size_t list_workspace(const te_fl_context&, const Args& args) {
  return kStoreWorkspace + static_cast<size_t>(args.outputs_count) * sizeof(float);
}
template <class Args, auto F, auto Refuses>
void append_list(std::vector<te_fl_op_desc>& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses>(name));
  ops.back().describe = kDescribe<Args>;
  ops.back().workspace = backend::workspace_thunk<Args, list_workspace<Args>>;
}

}  // namespace

void append_quantize_lists(std::vector<te_fl_op_desc>& ops) {
  append_list<te_fl_multi_tensor_quantize_args, multi_tensor_quantize,
              refuse_multi_tensor_quantize>(ops, "multi_tensor_quantize");
  append_list<te_fl_split_quantize_args, split_quantize, refuse_split_quantize>(ops,
                                                                                "split_quantize");
}

}  // namespace te_fl::cuda
