// The ops add, strided_copy and fill, embedding and cross-entropy.
#include "te_fl/ops/tensor.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "dropout_kernels.hpp"
#include "integers.hpp"
#include "loss_kernels.hpp"
#include "norm_kernels.hpp"
#include "quant_store.hpp"
#include "strided_copy.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::cpu {
namespace {

using backend::invalid;
using backend::Matrix;

// ---- add

void add(const te_fl_context& ctx, const te_fl_add_args& args) {
  const Loader a(*args.a), b(*args.b);
  auto* mask = args.mask != nullptr ? backend::data<uint8_t>(*args.mask) : nullptr;
  const backend::RandomState random(*ctx.rng);
  const uint64_t seed = random.seed, offset = random.offset;
  const uint64_t threshold = numeric::dropout_threshold(args.p);
  const auto factor = static_cast<float>(1.0 / (1.0 - static_cast<double>(args.p)));
  const auto values = [&](const Piece& piece, float* out) {
    Chunk branch;
    a(piece.col, piece.n, out);
    b(piece.col, piece.n, branch.data);
    if (mask == nullptr) return add_f32(branch.data, piece.n, out);
    // A piece starts at a multiple of kChunk elements, so its first element starts a byte of the
    // mask and a Philox block.
    uint8_t* bits = mask + piece.col / 8;
    keep_bits(seed, offset + static_cast<uint64_t>(piece.col / 4), threshold, piece.n, bits);
    add_kept(branch.data, bits, factor, piece.n, out);
  };
  store_output(*args.output, values, {.flat = true});
}
Refusal refuse_add(const te_fl_add_args& args) {
  if (!all_dense(args.a, args.b, args.output, args.mask)) return kNotContiguous;
  if (overlaps_askew(*args.output, *args.a) || overlaps_askew(*args.output, *args.b)) {
    return kOverlaps;
  }
  return nullptr;
}

// ---- strided_copy, fill

void strided_copy(const te_fl_context&, const te_fl_strided_copy_args& args) {
  copy_tensor(*args.input, *args.output);
}
Refusal refuse_strided_copy(const te_fl_strided_copy_args& args) {
  return refuse_copy(*args.input, *args.output);
}

template <class T>
void fill_elements(const te_fl_tensor& output, T value) {
  if (!dense(&output)) {  // copies one element with strides of zero
    std::vector<int64_t> strides(static_cast<size_t>(output.dl.ndim), 0);
    te_fl_tensor element = output;
    element.dl.data = &value;
    element.dl.byte_offset = 0;
    element.dl.strides = strides.data();
    return copy_tensor(element, output);
  }
  T* data = backend::data<T>(output);
  ThreadPool::instance().parallel_for(
      backend::numel(output), kGrain,
      [&](int64_t begin, int64_t end) { std::fill(data + begin, data + end, value); });
}

// Conversions to integers round towards zero; the op's rules keep the value in their range.
void fill(const te_fl_context&, const te_fl_fill_args& args) {
  const te_fl_tensor& output = *args.output;
  switch (dtype_of(output)) {
    case TE_FL_F64:
      return fill_elements(output, args.value);
    case TE_FL_F32:
      return fill_elements(output, static_cast<float>(args.value));
    case TE_FL_F16:
      return fill_elements(output, numeric::double_to_fp16(args.value));
    case TE_FL_BF16:
      return fill_elements(output, numeric::double_to_bf16(args.value));
    case TE_FL_F8E4M3:
      return fill_elements(output, numeric::double_to_e4m3(args.value));
    case TE_FL_F8E5M2:
      return fill_elements(output, numeric::double_to_e5m2(args.value));
    case TE_FL_F8E8M0:
      return fill_elements(output, numeric::double_to_e8m0(args.value));
    case TE_FL_I8:
      return fill_elements(output, static_cast<int8_t>(args.value));
    case TE_FL_I16:
      return fill_elements(output, static_cast<int16_t>(args.value));
    case TE_FL_I32:
      return fill_elements(output, static_cast<int32_t>(args.value));
    case TE_FL_I64:
      return fill_elements(output, static_cast<int64_t>(args.value));
    case TE_FL_U16:
      return fill_elements(output, static_cast<uint16_t>(args.value));
    case TE_FL_U32:
      return fill_elements(output, static_cast<uint32_t>(args.value));
    case TE_FL_U64:
      return fill_elements(output, static_cast<uint64_t>(args.value));
    default:  // u8 and bool
      return fill_elements(output, static_cast<uint8_t>(args.value));
  }
}
Refusal refuse_fill(const te_fl_fill_args& args) { return refuse_copy(*args.output, *args.output); }

// ---- embedding

void check_range(const te_fl_tensor& t, const char* name, int64_t extent, const char* more,
                 const int64_t* ignored = nullptr) {
  const Integers values(t);
  const int64_t size = backend::numel(t);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t v = values[i];
    if ((v >= 0 && v < extent) || (ignored != nullptr && v == *ignored)) continue;
    invalid(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(v) +
            "; it must lie in [0, " + std::to_string(extent) + ")" + more);
  }
}

void embedding_fwd(const te_fl_context&, const te_fl_embedding_fwd_args& args) {
  const Matrix table = backend::as_matrix(*args.weight);
  check_range(*args.indices, "indices", table.rows, ", the rows of weight");
  const Integers indices(*args.indices);
  const int from = dtype_of(*args.weight), to = dtype_of(*args.output);
  const int64_t from_row = table.cols * element_bytes(*args.weight);
  const int64_t to_row = table.cols * element_bytes(*args.output);
  const char* weight = backend::data<const char>(*args.weight);
  char* output = backend::data<char>(*args.output);
  ThreadPool::instance().parallel_for(
      backend::numel(*args.indices), grain_of_rows(table.cols), [&](int64_t begin, int64_t end) {
        Chunk values;
        for (int64_t i = begin; i < end; ++i) {
          const char* src = weight + indices[i] * from_row;
          char* dst = output + i * to_row;
          if (from == to) {
            std::memcpy(dst, src, static_cast<size_t>(from_row));
            continue;
          }
          for (int64_t col = 0; col < table.cols; col += kChunk) {
            const int64_t n = std::min(kChunk, table.cols - col);
            load_f32(from, src + col * element_bytes(*args.weight), n, values.data);
            store_f32(to, values.data, n, dst + col * element_bytes(*args.output));
          }
        }
      });
}
Refusal refuse_embedding_fwd(const te_fl_embedding_fwd_args& args) {
  if (!all_dense(args.indices, args.weight, args.output)) return kNotContiguous;
  return overlaps(*args.output, *args.weight) ? kOverlaps : nullptr;
}

// The positions of the index tensor, grouped by the table row that they look up, and ascending in
// each group. The positions of row v are positions[first[v]] to positions[first[v + 1] - 1].
struct Grouped {
  std::vector<int64_t> first, positions;

  Grouped(const te_fl_tensor& tensor, int64_t rows)
      : first(static_cast<size_t>(rows) + 1, 0),
        positions(static_cast<size_t>(backend::numel(tensor))) {
    const Integers indices(tensor);
    const auto size = static_cast<int64_t>(positions.size());
    for (int64_t i = 0; i < size; ++i) ++first[static_cast<size_t>(indices[i]) + 1];
    for (size_t v = 1; v < first.size(); ++v) first[v] += first[v - 1];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < size; ++i) {
      positions[static_cast<size_t>(next[static_cast<size_t>(indices[i])]++)] = i;
    }
  }
};

void embedding_bwd(const te_fl_context&, const te_fl_embedding_bwd_args& args) {
  const Matrix table = backend::as_matrix(*args.grad_weight);
  check_range(*args.indices, "indices", table.rows, ", the rows of weight");
  const Grouped groups(*args.indices, table.rows);
  const Loader grad(*args.grad_output), previous(*args.grad_weight);
  const int dtype = dtype_of(*args.grad_weight);
  const int64_t bytes = element_bytes(*args.grad_weight);
  char* out = backend::data<char>(*args.grad_weight);
  const auto sum_row = [&](int64_t v) {
    const int64_t begin = groups.first[static_cast<size_t>(v)];
    const int64_t end = groups.first[static_cast<size_t>(v) + 1];
    if (begin == end && args.accumulate) return;
    for (int64_t col = 0; col < table.cols; col += kChunk) {
      const int64_t n = std::min(kChunk, table.cols - col), at = v * table.cols + col;
      double sums[kChunk] = {};
      Chunk values;
      if (args.accumulate) {
        previous(at, n, values.data);
        add_to_sums(values.data, n, sums);
      }
      for (int64_t p = begin; p < end; ++p) {
        grad(groups.positions[static_cast<size_t>(p)] * table.cols + col, n, values.data);
        add_to_sums(values.data, n, sums);
      }
      for (int64_t i = 0; i < n; ++i) values.data[i] = static_cast<float>(sums[i]);
      store_f32(dtype, values.data, n, out + at * bytes);
    }
  };
  // Uses parallel_tasks(), because rows have very different amounts of work. A task is a block of
  // `block` rows.
  const int64_t block = ceil_div(table.rows, 1024);
  const int64_t work = (backend::numel(*args.indices) + table.rows) * table.cols;
  const auto sum_block = [&](int64_t i) {
    for (int64_t v = i * block; v < std::min((i + 1) * block, table.rows); ++v) sum_row(v);
  };
  const int64_t blocks = table.rows == 0 ? 0 : ceil_div(table.rows, block);
  if (work < kGrain) {
    for (int64_t i = 0; i < blocks; ++i) sum_block(i);
  } else {
    ThreadPool::instance().parallel_tasks(blocks, sum_block);
  }
}
Refusal refuse_embedding_bwd(const te_fl_embedding_bwd_args& args) {
  if (!all_dense(args.indices, args.grad_output, args.grad_weight)) return kNotContiguous;
  return overlaps(*args.grad_weight, *args.grad_output) ? kOverlaps : nullptr;
}

// ---- cross-entropy

constexpr const char* kClasses = ", the classes, or be ignore_index";

struct RowStatistics {
  double lse = 0.0, sum = 0.0;
};

// Loads one row chunk by chunk as FP32 and calls f(values, n) for each chunk.
template <class F>
void for_each_chunk(const Loader& load, int64_t row, int64_t cols, F&& f) {
  Chunk values;
  for (int64_t col = 0; col < cols; col += kChunk) {
    const int64_t n = std::min(kChunk, cols - col);
    load(row * cols + col, n, values.data);
    f(values.data, n);
  }
}

// Computes a row's statistics in one pass, with a running sum of exp(x - largest x so far).
RowStatistics compute_statistics(const Loader& logits, int64_t row, int64_t classes,
                                 bool with_sum) {
  RowStatistics s;
  float max = -std::numeric_limits<float>::infinity();
  double sum = 0.0;
  for_each_chunk(logits, row, classes, [&](const float* x, int64_t n) {
    const float before = max;
    max = running_max(before, x, n);
    if (with_sum) s.sum += row_sum(x, n);
    if (!std::isfinite(max)) return;
    if (max > before) sum *= std::exp(static_cast<double>(before) - max);
    sum += sum_of_exp(x, n, max);
  });
  s.lse = max;
  if (!std::isfinite(max)) return s;
  s.lse = max + std::log(sum);
  return s;
}

void cross_entropy_fwd(const te_fl_context&, const te_fl_cross_entropy_fwd_args& args) {
  const Matrix matrix = backend::as_matrix(*args.logits);
  check_range(*args.targets, "targets", matrix.cols, kClasses, &args.ignore_index);
  const Integers targets(*args.targets);
  const Loader logits(*args.logits);
  auto* loss = backend::data<float>(*args.loss);
  auto* lse = backend::data<float>(*args.lse);
  const double smoothing = args.label_smoothing;
  ThreadPool::instance().parallel_for(
      matrix.rows, grain_of_rows(matrix.cols), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const RowStatistics s = compute_statistics(logits, row, matrix.cols, smoothing != 0.0);
          lse[row] = static_cast<float>(s.lse);
          loss[row] = 0.0f;
          if (targets[row] == args.ignore_index) continue;
          // A term with factor 0 is skipped, because its logit may be -infinity (a masked class),
          // which times 0 would be NaN.
          double value = s.lse;
          if (smoothing != 1.0) {
            float target[kPad];
            logits(row * matrix.cols + targets[row], 1, target);
            value -= (1.0 - smoothing) * target[0];
          }
          if (smoothing != 0.0) value -= smoothing * s.sum / static_cast<double>(matrix.cols);
          loss[row] = static_cast<float>(value);
        }
      });
}
Refusal refuse_cross_entropy_fwd(const te_fl_cross_entropy_fwd_args& args) {
  return all_dense(args.logits, args.targets, args.loss, args.lse) ? nullptr : kNotContiguous;
}

void cross_entropy_bwd(const te_fl_context&, const te_fl_cross_entropy_bwd_args& args) {
  const int64_t classes = backend::as_matrix(*args.logits).cols;
  check_range(*args.targets, "targets", classes, kClasses, &args.ignore_index);
  const Integers targets(*args.targets);
  const Loader logits(*args.logits);
  const auto* grad = backend::data<const float>(*args.grad_loss);
  const auto* lse = backend::data<const float>(*args.lse);
  const float smoothing = args.label_smoothing;
  const float spread = smoothing / static_cast<float>(std::max<int64_t>(classes, 1));
  const auto values = [&](const Piece& piece, float* out) {
    const int64_t target = targets[piece.row];
    if (target == args.ignore_index) {
      std::fill_n(out, piece.n, 0.0f);
      return;
    }
    logits(piece.row * classes + piece.col, piece.n, out);
    const int64_t at = target - piece.col;
    const bool has_target = at >= 0 && at < piece.n;
    float own[kPad] = {};
    if (has_target) own[0] = out[at];
    exp_gradient(out, piece.n, lse[piece.row], spread, grad[piece.row], out);
    if (has_target) {
      exp_gradient(own, 1, lse[piece.row], spread + (1.0f - smoothing), grad[piece.row], own);
      out[at] = own[0];
    }
  };
  store_output(*args.grad_logits, values);
}
Refusal refuse_cross_entropy_bwd(const te_fl_cross_entropy_bwd_args& args) {
  if (!all_dense(args.grad_loss, args.logits, args.targets) ||
      !all_dense(args.lse, args.grad_logits)) {
    return kNotContiguous;
  }
  return overlaps_askew(*args.grad_logits, *args.logits) ? kOverlaps : nullptr;
}

}  // namespace

void append_tensor(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_add_args, add, refuse_add>("add"));
  ops.push_back(
      descriptor<te_fl_strided_copy_args, strided_copy, refuse_strided_copy>("strided_copy"));
  ops.push_back(descriptor<te_fl_fill_args, fill, refuse_fill>("fill"));
  ops.push_back(
      descriptor<te_fl_embedding_fwd_args, embedding_fwd, refuse_embedding_fwd>("embedding_fwd"));
  ops.push_back(
      descriptor<te_fl_embedding_bwd_args, embedding_bwd, refuse_embedding_bwd>("embedding_bwd"));
  ops.push_back(
      descriptor<te_fl_cross_entropy_fwd_args, cross_entropy_fwd, refuse_cross_entropy_fwd>(
          "cross_entropy_fwd"));
  ops.push_back(
      descriptor<te_fl_cross_entropy_bwd_args, cross_entropy_bwd, refuse_cross_entropy_bwd>(
          "cross_entropy_bwd"));
}

}  // namespace te_fl::cpu
