// The activation ops: forward, gradient, and gradient with the bias gradient. This file maps
// elements to buffers; the arithmetic is in activation_kernels.cpp.
#include "te_fl/ops/activation.h"

#include "activation_kernels.hpp"
#include "quant_store.hpp"

namespace te_fl::cpu {
namespace {

// Returns why an elementwise op does not support its tensors. An unquantised output may share the
// input's memory; a quantised output may not.
Refusal refuse_elementwise(const te_fl_tensor& input, const te_fl_tensor& output) {
  if (!dense(&input)) return kNotContiguous;
  const bool plain = backend::scaling(output) == TE_FL_SCALING_NONE;
  if (plain ? overlaps_askew(output, input) : overlaps(output, input)) return kOverlaps;
  return refuse_output(output);
}

template <Act kAct>
void forward(const te_fl_context&, const te_fl_activation_act_fwd_args& args) {
  const Loader input(*args.input);
  const auto values = [&](const Piece& piece, float* out) {
    input(piece.col, piece.n, out);
    act_forward(kAct, out, piece.n, out);
  };
  store_output(*args.output, values, {.flat = true});
}
Refusal refuse_forward(const te_fl_activation_act_fwd_args& args) {
  return refuse_elementwise(*args.input, *args.output);
}

template <class Args>
void backward(Act act, const Args& args, ColumnSums* sums) {
  const Loader grad(*args.grad), input(*args.input);
  const auto values = [&](const Piece& piece, float* out) {
    Chunk x;
    input(piece.col, piece.n, x.data);
    grad(piece.col, piece.n, out);
    act_backward(act, out, x.data, piece.n, out);
  };
  store_output(*args.output, values, {.sums = sums, .flat = true});
}

template <Act kAct>
void plain_backward(const te_fl_context&, const te_fl_activation_act_bwd_args& args) {
  backward(kAct, args, nullptr);
}
template <class Args>
Refusal refuse_backward(const Args& args) {
  const Refusal refusal = refuse_elementwise(*args.grad, *args.output);
  return refusal != nullptr ? refusal : refuse_elementwise(*args.input, *args.output);
}

template <Act kAct>
void dbias_backward(const te_fl_context&, const te_fl_activation_dbias_act_args& args) {
  ColumnSums sums(backend::as_matrix(*args.output).cols);
  backward(kAct, args, &sums);
  sums.store(*args.dbias);
}
Refusal refuse_dbias_backward(const te_fl_activation_dbias_act_args& args) {
  return dense(args.dbias) ? refuse_backward(args) : kNotContiguous;
}

// ---- gated forms

template <class Args>
void gated(Act act, GateOptions options, const Args& args) {
  const Loader input(*args.input);
  const int64_t half = backend::as_matrix(*args.output).cols;
  const auto values = [&](const Piece& piece, float* out) {
    Chunk b;
    const int64_t first = piece.row * 2 * half + piece.col;
    input(first, piece.n, out);
    input(first + half, piece.n, b.data);
    gated_forward(act, options, out, b.data, piece.n, out);
  };
  store_output(*args.output, values);
}
template <class Args>
Refusal refuse_gated(const Args& args) {
  if (!dense(args.input)) return kNotContiguous;
  if (overlaps(*args.output, *args.input)) return kOverlaps;
  return refuse_output(*args.output);
}

// Computes the gradients of both halves of the input together and writes each to its half of the
// output, so the output may share the input's memory.
template <class Args>
void gated_gradient_in_pairs(Act act, GateOptions options, const Args& args) {
  const Loader grad(*args.grad), input(*args.input);
  const backend::Matrix out = backend::as_matrix(*args.grad);
  const int64_t half = out.cols, chunks = ceil_div(half, kChunk);
  const int dtype = dtype_of(*args.output);
  const int64_t bytes = element_bytes(*args.output);
  char* to = backend::data<char>(*args.output);
  const bool stream = exceeds_cache(out.rows * 2 * half * bytes);
  const Parts parts(out.rows * chunks,
                    ceil_div(kGrain, std::min(std::max<int64_t>(half, 1), kChunk)));
  parts.run([&](int64_t, int64_t begin, int64_t end) {
    Chunk dy, a, b;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / chunks, col = unit % chunks * kChunk;
      const int64_t n = std::min(kChunk, half - col), first = row * 2 * half + col;
      grad(row * half + col, n, dy.data);
      input(first, n, a.data);
      input(first + half, n, b.data);
      gated_backward(act, options, dy.data, a.data, b.data, n, a.data, b.data);
      store_f32(dtype, a.data, n, to + first * bytes, stream);
      store_f32(dtype, b.data, n, to + (first + half) * bytes, stream);
    }
    store_fence();
  });
}

template <class Args>
void gated_gradient(Act act, GateOptions options, const Args& args) {
  if (backend::scaling(*args.output) == TE_FL_SCALING_NONE) {
    return gated_gradient_in_pairs(act, options, args);
  }
  const Loader grad(*args.grad), input(*args.input);
  const int64_t half = backend::as_matrix(*args.grad).cols;
  const auto values = [&](const Piece& piece, float* out) {
    Chunk dy, a, b;
    // A piece (a range of columns) may start in the first half of the row and end in the second.
    for (int64_t done = 0; done < piece.n;) {
      const int64_t col = piece.col + done;
      const bool first = col < half;
      const int64_t c = first ? col : col - half;
      const int64_t n = std::min(piece.n - done, half - c), at = piece.row * 2 * half + c;
      grad(piece.row * half + c, n, dy.data);
      input(at, n, a.data);
      input(at + half, n, b.data);
      float* gradient = first ? a.data : b.data;
      gated_backward(act, options, dy.data, a.data, b.data, n, first ? gradient : nullptr,
                     first ? nullptr : gradient);
      std::copy_n(gradient, n, out + done);
      done += n;
    }
  };
  store_output(*args.output, values);
}
template <class Args>
Refusal refuse_gated_gradient(const Args& args) {
  if (!all_dense(args.grad, args.input)) return kNotContiguous;
  if (overlaps(*args.output, *args.grad)) return kOverlaps;
  const bool plain = backend::scaling(*args.output) == TE_FL_SCALING_NONE;
  if (plain ? overlaps_askew(*args.output, *args.input) : overlaps(*args.output, *args.input)) {
    return kOverlaps;
  }
  return refuse_output(*args.output);
}

template <Act kAct>
void gated_fwd(const te_fl_context&, const te_fl_activation_glu_fwd_args& args) {
  gated(kAct, {}, args);
}
template <Act kAct>
void gated_bwd(const te_fl_context&, const te_fl_activation_glu_bwd_args& args) {
  gated_gradient(kAct, {}, args);
}
void clamped_fwd(const te_fl_context&, const te_fl_activation_clamped_fwd_args& args) {
  gated(Act::kClamped, {.limit = args.limit, .alpha = args.alpha, .offset = args.glu_linear_offset},
        args);
}
void clamped_bwd(const te_fl_context&, const te_fl_activation_clamped_bwd_args& args) {
  gated_gradient(Act::kClamped,
                 {.limit = args.limit, .alpha = args.alpha, .offset = args.glu_linear_offset},
                 args);
}

using Ops = std::vector<te_fl_op_desc>;

template <Act kAct>
void append_plain(Ops& ops, const char* name, const char* gradient, const char* dbias) {
  using Fwd = te_fl_activation_act_fwd_args;
  using Bwd = te_fl_activation_act_bwd_args;
  using Dbias = te_fl_activation_dbias_act_args;
  ops.push_back(descriptor<Fwd, forward<kAct>, refuse_forward>(name));
  ops.push_back(descriptor<Bwd, plain_backward<kAct>, refuse_backward<Bwd>>(gradient));
  ops.push_back(descriptor<Dbias, dbias_backward<kAct>, refuse_dbias_backward>(dbias));
}

template <Act kAct>
void append_gated(Ops& ops, const char* name, const char* gradient) {
  using Fwd = te_fl_activation_glu_fwd_args;
  using Bwd = te_fl_activation_glu_bwd_args;
  ops.push_back(descriptor<Fwd, gated_fwd<kAct>, refuse_gated<Fwd>>(name));
  ops.push_back(descriptor<Bwd, gated_bwd<kAct>, refuse_gated_gradient<Bwd>>(gradient));
}

}  // namespace

void append_activation(Ops& ops) {
  append_plain<Act::kGelu>(ops, "gelu", "dgelu", "dbias_dgelu");
  append_plain<Act::kQgelu>(ops, "qgelu", "dqgelu", "dbias_dqgelu");
  append_plain<Act::kRelu>(ops, "relu", "drelu", "dbias_drelu");
  append_plain<Act::kSrelu>(ops, "srelu", "dsrelu", "dbias_dsrelu");
  append_plain<Act::kSilu>(ops, "silu", "dsilu", "dbias_dsilu");
  append_gated<Act::kGelu>(ops, "geglu", "dgeglu");
  append_gated<Act::kQgelu>(ops, "qgeglu", "dqgeglu");
  append_gated<Act::kRelu>(ops, "reglu", "dreglu");
  append_gated<Act::kSrelu>(ops, "sreglu", "dsreglu");
  append_gated<Act::kSilu>(ops, "swiglu", "dswiglu");
  append_gated<Act::kSigmoid>(ops, "glu", "dglu");
  using Fwd = te_fl_activation_clamped_fwd_args;
  using Bwd = te_fl_activation_clamped_bwd_args;
  ops.push_back(descriptor<Fwd, clamped_fwd, refuse_gated<Fwd>>("clamped_swiglu"));
  ops.back().later_args = "glu_linear_offset";
  ops.push_back(descriptor<Bwd, clamped_bwd, refuse_gated_gradient<Bwd>>("clamped_dswiglu"));
  ops.back().later_args = "glu_linear_offset";
}

}  // namespace te_fl::cpu
