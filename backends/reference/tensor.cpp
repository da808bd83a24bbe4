// The ops add, strided_copy and fill, embedding and cross-entropy.
#include "te_fl/ops/tensor.h"

#include <cmath>
#include <limits>

#include "dispatch.hpp"
#include "element.hpp"
#include "families.hpp"
#include "integers.hpp"
#include "random.hpp"
#include "te_fl/numeric.hpp"

namespace te_fl::reference {
namespace {

using backend::invalid;
using backend::Matrix;

// ---- add

// Returns dropout's decisions for n elements: bit i % 8 of byte i / 8 is set if element i is kept.
// Bits past the last element are 0.
std::vector<uint8_t> keep_bits(const te_fl_rng& rng, float p, int64_t n) {
  DropoutStream stream(rng, p);
  std::vector<uint8_t> bits(static_cast<size_t>((n + 7) / 8), 0);
  for (int64_t i = 0; i < n; ++i) {
    if (stream.keep(static_cast<uint64_t>(i))) bits[i / 8] |= static_cast<uint8_t>(1u << (i % 8));
  }
  return bits;
}

void add(const te_fl_context& ctx, const te_fl_add_args& args) {
  const int64_t size = backend::numel(*args.output);
  const Reader a(*args.a), b(*args.b);
  const std::vector<uint8_t> keep =
      args.mask != nullptr ? keep_bits(*ctx.rng, args.p, size) : std::vector<uint8_t>();
  const double kept = 1.0 - static_cast<double>(args.p);
  const int64_t cols = backend::as_matrix(*args.output).cols;
  store_output(*args.output, {args.a, args.b},
               [&](int64_t row, int64_t col, int64_t n, float* out) {
                 std::vector<float> branch(static_cast<size_t>(n));
                 const int64_t begin = row * cols + col;
                 a.read(begin, n, out);
                 b.read(begin, n, branch.data());
                 for (int64_t i = 0; i < n; ++i) {
                   const int64_t e = begin + i;
                   if (!keep.empty() && (keep[e / 8] >> (e % 8) & 1) == 0) continue;
                   out[i] = static_cast<float>(out[i] + branch[i] / kept);
                 }
               });
  if (args.mask == nullptr) return;
  auto* mask = backend::data<uint8_t>(*args.mask);
  for (size_t i = 0; i < keep.size(); ++i) {
    mask[element_offset(*args.mask, static_cast<int64_t>(i))] = keep[i];
  }
}

// ---- strided_copy, fill

constexpr int64_t kChunk = 4096;

bool is_float(int dtype) { return dtype <= TE_FL_F8E8M0; }

// Copies elements without conversion. Bits is an unsigned type of the element's size, or fp4e2m1.
template <class Bits>
void copy_bits(const te_fl_tensor& input, const te_fl_tensor& output) {
  const auto* from = backend::data<const char>(input);
  auto* to = backend::data<char>(output);
  std::vector<Bits> chunk(kChunk);
  const int64_t size = backend::numel(input);
  for (int64_t begin = 0; begin < size; begin += kChunk) {
    const int64_t n = std::min(kChunk, size - begin);
    Bits* next = chunk.data();
    for_each_run(input, begin, n, [&](int64_t offset, int64_t stride, int64_t count) {
      for (int64_t j = 0; j < count; ++j) *next++ = load<Bits>(from, offset + j * stride);
    });
    next = chunk.data();
    for_each_run(output, begin, n, [&](int64_t offset, int64_t stride, int64_t count) {
      for (int64_t j = 0; j < count; ++j) save<Bits>(to, offset + j * stride, *next++);
    });
  }
}

void copy_same_dtype(const te_fl_tensor& input, const te_fl_tensor& output) {
  switch (input.dl.dtype.bits) {
    case 4:
      return copy_bits<numeric::fp4e2m1>(input, output);
    case 8:
      return copy_bits<uint8_t>(input, output);
    case 16:
      return copy_bits<uint16_t>(input, output);
    case 32:
      return copy_bits<uint32_t>(input, output);
    default:
      return copy_bits<uint64_t>(input, output);
  }
}

void strided_copy(const te_fl_context&, const te_fl_strided_copy_args& args) {
  const int from = dtype_of(*args.input), to = dtype_of(*args.output);
  if (from == to) return copy_same_dtype(*args.input, *args.output);
  if (!is_float(from) || !is_float(to)) {
    invalid(std::string("input is ") + dtype_name(from) + ", output is " + dtype_name(to) +
            "; only float types convert into each other, others copy to themselves");
  }
  // Converts through double, which represents every value of every float dtype exactly, so only the
  // conversion to the output's dtype rounds.
  const Reader reader(*args.input);
  const Writer writer(*args.output);
  std::vector<double> chunk(kChunk);
  for (int64_t begin = 0; begin < reader.size(); begin += kChunk) {
    const int64_t n = std::min(kChunk, reader.size() - begin);
    reader.read(begin, n, chunk.data());
    writer.write(begin, n, chunk.data());
  }
}

template <class T>
void fill_elements(const te_fl_tensor& output, T value) {
  auto* data = backend::data<char>(output);
  const int64_t size = backend::numel(output);
  for_each_run(output, 0, size, [&](int64_t offset, int64_t stride, int64_t count) {
    for (int64_t j = 0; j < count; ++j) save<T>(data, offset + j * stride, value);
  });
}

// Conversions to integers round towards zero; the op's rules keep the value in their range.
void fill(const te_fl_context&, const te_fl_fill_args& args) {
  const te_fl_tensor& output = *args.output;
  switch (dtype_of(output)) {
    case TE_FL_I8:
      return fill_elements(output, static_cast<int8_t>(args.value));
    case TE_FL_I16:
      return fill_elements(output, static_cast<int16_t>(args.value));
    case TE_FL_I32:
      return fill_elements(output, static_cast<int32_t>(args.value));
    case TE_FL_I64:
      return fill_elements(output, static_cast<int64_t>(args.value));
    case TE_FL_U8:
    case TE_FL_BOOL:
      return fill_elements(output, static_cast<uint8_t>(args.value));
    case TE_FL_U16:
      return fill_elements(output, static_cast<uint16_t>(args.value));
    case TE_FL_U32:
      return fill_elements(output, static_cast<uint32_t>(args.value));
    case TE_FL_U64:
      return fill_elements(output, static_cast<uint64_t>(args.value));
    default:
      visit_float(dtype_of(output), [&](auto type) {
        using T = typename decltype(type)::type;
        fill_elements(output, numeric::from_double<T>(args.value));
      });
  }
}

// ---- embedding, cross-entropy

[[noreturn]] void out_of_range(const char* name, size_t i, int64_t value, int64_t extent,
                               const char* more) {
  invalid(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value) +
          "; it must lie in [0, " + std::to_string(extent) + ")" + more);
}

std::vector<int64_t> checked_indices(const te_fl_tensor& indices, int64_t extent) {
  std::vector<int64_t> values = integers(indices);
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0 || values[i] >= extent) {
      out_of_range("indices", i, values[i], extent, ", the rows of weight");
    }
  }
  return values;
}

std::vector<int64_t> checked_targets(const te_fl_tensor& targets, int64_t extent, int64_t ignored) {
  std::vector<int64_t> values = integers(targets);
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != ignored && (values[i] < 0 || values[i] >= extent)) {
      out_of_range("targets", i, values[i], extent, ", the classes, or be ignore_index");
    }
  }
  return values;
}

void embedding_fwd(const te_fl_context&, const te_fl_embedding_fwd_args& args) {
  const Matrix table = backend::as_matrix(*args.weight);
  const std::vector<int64_t> indices = checked_indices(*args.indices, table.rows);
  const Reader weight(*args.weight);
  store_output(
      *args.output, {args.weight},
      [&](int64_t row, int64_t col, int64_t n, float* out) {
        weight.read(indices[row] * table.cols + col, n, out);
      },
      Access::kAnywhere);
}

void embedding_bwd(const te_fl_context&, const te_fl_embedding_bwd_args& args) {
  const Matrix table = backend::as_matrix(*args.grad_weight);
  const std::vector<int64_t> indices = checked_indices(*args.indices, table.rows);
  // Groups the positions of the index tensor by the table row that they look up, ascending in each
  // group.
  std::vector<size_t> first(static_cast<size_t>(table.rows) + 1, 0);
  for (const int64_t v : indices) ++first[static_cast<size_t>(v) + 1];
  for (size_t v = 1; v < first.size(); ++v) first[v] += first[v - 1];
  std::vector<size_t> next(first.begin(), first.end() - 1), positions(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    positions[next[static_cast<size_t>(indices[i])]++] = i;
  }
  const Reader grad(*args.grad_output), previous(*args.grad_weight);
  std::vector<float> row(table.rows == 0 ? 0 : static_cast<size_t>(table.cols));
  std::vector<double> sums(row.size());
  for (int64_t v = 0; v < table.rows; ++v) {
    std::fill(sums.begin(), sums.end(), 0.0);
    if (args.accumulate) previous.read(v * table.cols, table.cols, sums.data());
    for (size_t p = first[static_cast<size_t>(v)]; p < first[static_cast<size_t>(v) + 1]; ++p) {
      grad.read(static_cast<int64_t>(positions[p]) * table.cols, table.cols, row.data());
      for (size_t c = 0; c < row.size(); ++c) sums[c] += row[c];
    }
    row.assign(sums.begin(), sums.end());
    Writer(*args.grad_weight).write(v * table.cols, table.cols, row.data());
  }
}

double log_sum_exp(const std::vector<float>& x) {
  double max = -std::numeric_limits<double>::infinity();
  for (const float v : x) max = v > max || std::isnan(v) ? v : max;
  if (std::isinf(max)) return max;
  double sum = 0.0;
  for (const float v : x) sum += std::exp(v - max);
  return max + std::log(sum);
}

void cross_entropy_fwd(const te_fl_context&, const te_fl_cross_entropy_fwd_args& args) {
  const int64_t classes = backend::as_matrix(*args.logits).cols;
  const std::vector<int64_t> targets = checked_targets(*args.targets, classes, args.ignore_index);
  const Reader logits(*args.logits);
  const double smoothing = args.label_smoothing;
  std::vector<float> x(targets.empty() ? 0 : static_cast<size_t>(classes));
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    logits.read(row * classes, classes, x.data());
    const double lse = log_sum_exp(x);
    double loss = 0.0;
    if (targets[i] != args.ignore_index) {
      // A term with factor 0 is skipped, because its logit may be -infinity (a masked class), which
      // times 0 would be NaN.
      loss = lse;
      if (smoothing != 1.0) loss -= (1.0 - smoothing) * x[static_cast<size_t>(targets[i])];
      if (smoothing != 0.0) {
        double sum = 0.0;
        for (const float v : x) sum += v;
        loss -= smoothing * sum / static_cast<double>(classes);
      }
    }
    Writer(*args.loss).set(row, static_cast<float>(loss));
    Writer(*args.lse).set(row, static_cast<float>(lse));
  }
}

void cross_entropy_bwd(const te_fl_context&, const te_fl_cross_entropy_bwd_args& args) {
  const int64_t classes = backend::as_matrix(*args.logits).cols;
  const std::vector<int64_t> targets = checked_targets(*args.targets, classes, args.ignore_index);
  const Reader logits(*args.logits), grad(*args.grad_loss);
  const Reader lse(*args.lse);
  const double smoothing = args.label_smoothing;
  store_output(
      *args.grad_logits, {args.logits}, [&](int64_t row, int64_t col, int64_t n, float* out) {
        const int64_t target = targets[static_cast<size_t>(row)];
        if (target == args.ignore_index) {
          std::fill_n(out, n, 0.0f);
          return;
        }
        logits.read(row * classes + col, n, out);
        const double g = grad[row], row_lse = lse[row];
        for (int64_t i = 0; i < n; ++i) {
          double value = std::exp(out[i] - row_lse) - smoothing / static_cast<double>(classes);
          if (col + i == target) value -= 1.0 - smoothing;
          out[i] = static_cast<float>(g * value);
        }
      });
}

}  // namespace

void append_tensor(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_add_args, add>("add"));
  ops.push_back(descriptor<te_fl_strided_copy_args, strided_copy>("strided_copy"));
  ops.push_back(descriptor<te_fl_fill_args, fill>("fill"));
  ops.push_back(descriptor<te_fl_embedding_fwd_args, embedding_fwd>("embedding_fwd"));
  ops.push_back(descriptor<te_fl_embedding_bwd_args, embedding_bwd>("embedding_bwd"));
  ops.push_back(descriptor<te_fl_cross_entropy_fwd_args, cross_entropy_fwd>("cross_entropy_fwd"));
  ops.push_back(descriptor<te_fl_cross_entropy_bwd_args, cross_entropy_bwd>("cross_entropy_bwd"));
}

}  // namespace te_fl::reference
