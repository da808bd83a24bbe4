// generic_gemm and grouped_gemm. oneDNN computes the matrix products on the thread pool: in BF16 if
// BF16 represents the operands exactly, else in FP32, with FP32 accumulation. The epilogue is one
// pass over the FP32 results and rounds once.
#include "te_fl/ops/gemm.h"

#include <cmath>
#include <string>
#include <vector>

#include "activation_kernels.hpp"
#include "gemm_operand.hpp"
#include "norm_kernels.hpp"
#include "quant_store.hpp"
#include "sgemm.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/backend/grouped_gemm.hpp"

namespace te_fl::cpu {
namespace {

using Args = te_fl_generic_gemm_args;
using backend::invalid;

bool is_block_scaled(const te_fl_tensor& t) {
  const uint32_t scaling = backend::scaling(t);
  return scaling == TE_FL_SCALING_BLOCK_1X128 || scaling == TE_FL_SCALING_BLOCK_128X128;
}

Refusal refuse(const Args& args) {
  if (const Refusal refusal = refuse_operand(*args.a)) return refusal;
  if (const Refusal refusal = refuse_operand(*args.b)) return refusal;
  if (const Refusal refusal = refuse_output(*args.d)) return refusal;
  if (args.pre_gelu_out != nullptr) {
    if (const Refusal refusal = refuse_output(*args.pre_gelu_out)) return refusal;
  }
  if (args.pre_gelu_in != nullptr &&
      (args.pre_gelu_in->dl.data == nullptr || refuse_operand(*args.pre_gelu_in) != nullptr)) {
    return "pre_gelu_in must be contiguous and have row-wise data";
  }
  if (args.residual != nullptr && overlaps_askew(*args.d, *args.residual)) return kOverlaps;
  return all_dense(args.bias, args.bias_grad, args.residual, args.d_sum) ? nullptr : kNotContiguous;
}

// True if the product can be written directly to d: d is FP32 and there is no epilogue.
bool is_direct(const Args& args) {
  return dtype_of(*args.d) == TE_FL_F32 && args.bias == nullptr && !args.gelu &&
         args.pre_gelu_in == nullptr && args.residual == nullptr && args.d_sum == nullptr;
}

// ---- workspace: converted operands, then the FP32 product

struct Layout {
  size_t a = 0, b = 0, product = 0;  // sizes in bytes, multiples of 256
  size_t total() const { return a + b + product; }
};

size_t operand_bytes(const te_fl_tensor& t, bool bf16, bool may_be_f32) {
  const int dtype = dtype_of(t);
  if (dtype == TE_FL_F32 || (dtype == TE_FL_BF16 && bf16 && !may_be_f32)) return 0;
  const size_t bytes = bf16 && !may_be_f32 ? sizeof(uint16_t) : sizeof(float);
  return (static_cast<size_t>(backend::numel(t)) * bytes + 255) / 256 * 256;
}

// The dtype in which the GEMM reads its operands, as far as metadata determine it.
struct OperandType {
  bool bf16;       // BF16 is possible
  bool undecided;  // BF16 is used only if the block scales are powers of two, which is checked at
                   // run time
};
OperandType operand_type(const Args& args) {
  const auto narrow = [](const te_fl_tensor& t) { return dtype_of(t) == TE_FL_BF16 || is_fp8(t); };
  return {narrow(*args.a) && narrow(*args.b), is_block_scaled(*args.a) || is_block_scaled(*args.b)};
}

// Returns the workspace layout, from metadata only. If the dtype depends on block scales, the
// layout has room for the larger dtype.
Layout layout(const Args& args) {
  const OperandType type = operand_type(args);
  Layout l;
  l.a = operand_bytes(*args.a, type.bf16, type.undecided);
  l.b = operand_bytes(*args.b, type.bf16, type.undecided);
  if (!is_direct(args)) {
    l.product = (static_cast<size_t>(backend::numel(*args.d)) * sizeof(float) + 255) / 256 * 256;
  }
  return l;
}

size_t workspace(const te_fl_context&, const Args& args) { return layout(args).total(); }

// ---- the product

template <class T>
const T* operand(const StoredMatrix& m, char* scratch) {
  if constexpr (std::is_same_v<T, float>) {
    if (m.dtype == TE_FL_F32) return reinterpret_cast<const float*>(m.data);
    convert_to_f32(m, reinterpret_cast<float*>(scratch));
  } else {
    if (m.dtype == TE_FL_BF16) return reinterpret_cast<const uint16_t*>(m.data);
    convert_to_bf16(m, reinterpret_cast<uint16_t*>(scratch));
  }
  return reinterpret_cast<const T*>(scratch);
}

struct Product {
  StoredMatrix a, b;
  int64_t m, n, k;
  float alpha, beta;
  float* c;
  char *scratch_a, *scratch_b;

  void run() const {
    if (is_exact_in_bf16(a) && is_exact_in_bf16(b)) {
      bf16gemm(a.transposed, b.transposed, m, n, k, alpha, operand<uint16_t>(a, scratch_a), lead(a),
               operand<uint16_t>(b, scratch_b), lead(b), beta, c, std::max<int64_t>(n, 1));
    } else {
      sgemm(a.transposed, b.transposed, m, n, k, alpha, operand<float>(a, scratch_a), lead(a),
            operand<float>(b, scratch_b), lead(b), beta, c, std::max<int64_t>(n, 1));
    }
  }
  static int64_t lead(const StoredMatrix& x) { return std::max<int64_t>(x.cols, 1); }
};

// ---- the epilogue

// The elements of a dense tensor that is F32, F16, BF16 or per-tensor FP8.
class Values {
 public:
  explicit Values(const te_fl_tensor* t) {
    if (t == nullptr) return;
    const StoredMatrix m = stored_matrix(*t, false, true);
    data_ = m.data, dtype_ = m.dtype, bytes_ = element_bytes(*t), factor_ = m.factor;
  }
  void load(int64_t index, int64_t n, float* out) const {
    load_f32(dtype_, data_ + index * bytes_, n, out);
    if (factor_ != 1.0f) scale_f32(out, n, factor_);
  }

 private:
  const char* data_ = nullptr;
  int dtype_ = TE_FL_F32;
  int64_t bytes_ = 4;
  float factor_ = 1.0f;
};

void epilogue(const Args& args, const float* product) {
  const int64_t cols = backend::as_matrix(*args.d).cols;
  std::vector<float> bias(args.bias != nullptr ? static_cast<size_t>(padded(cols)) : 0);
  if (args.bias != nullptr) {
    load_f32(dtype_of(*args.bias), backend::data<const char>(*args.bias), cols, bias.data());
  }
  const Values pre_gelu_in(args.pre_gelu_in), residual(args.residual),
      previous(args.accumulate ? args.d : nullptr);
  const auto biased = [&](const Piece& piece, float* out) {
    load_f32(TE_FL_F32, product + piece.row * cols + piece.col, piece.n, out);
    if (!bias.empty()) add_f32(bias.data() + piece.col, piece.n, out);
  };
  const auto finished = [&](const Piece& piece, float* out) {
    biased(piece, out);
    Chunk other;
    const int64_t index = piece.row * cols + piece.col;
    if (args.gelu) act_forward(Act::kGelu, out, piece.n, out);
    if (args.pre_gelu_in != nullptr) {
      pre_gelu_in.load(index, piece.n, other.data);
      act_backward(Act::kGelu, out, other.data, piece.n, out);
    }
    if (args.residual != nullptr) {
      residual.load(index, piece.n, other.data);
      add_f32(other.data, piece.n, out);
    }
    if (args.accumulate && args.beta != 0.0f) {
      previous.load(index, piece.n, other.data);
      for (int64_t i = 0; i < piece.n; ++i) out[i] += args.beta * other.data[i];
    }
  };
  if (args.pre_gelu_out != nullptr) store_output(*args.pre_gelu_out, biased);
  if (args.d_sum == nullptr) return store_output(*args.d, finished);
  ColumnSums sums(cols);
  store_output(*args.d, finished, {.sums = &sums});
  sums.store(*args.d_sum);
}

// Computes the bias gradient, the sum of op(A) over K.
void bias_gradient(const Args& args, const StoredMatrix& a) {
  const int64_t bytes = is_fp8_dtype(a.dtype) ? 1 : a.dtype == TE_FL_F32 ? 4 : 2;
  ColumnSums sums(a.transposed ? a.cols : a.rows);
  if (a.transposed) {
    const int64_t chunks = ceil_div(a.cols, kChunk);
    const Parts parts(a.rows, grain_of_rows(a.cols));
    sums.start(parts.count());
    parts.run([&](int64_t part, int64_t begin, int64_t end) {
      Chunk piece;
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t c = 0; c < chunks; ++c) {
          const int64_t col = c * kChunk, n = std::min(kChunk, a.cols - col);
          load_f32(a.dtype, a.data + (row * a.cols + col) * bytes, n, piece.data);
          sums.add(part, col, n, piece.data);
        }
      }
    });
  } else {
    sums.start(1);
    ThreadPool::instance().parallel_for(
        a.rows, grain_of_rows(a.cols), [&](int64_t begin, int64_t end) {
          Chunk piece;
          for (int64_t row = begin; row < end; ++row) {
            double sum = 0.0;
            for (int64_t col = 0; col < a.cols; col += kChunk) {
              const int64_t n = std::min(kChunk, a.cols - col);
              load_f32(a.dtype, a.data + (row * a.cols + col) * bytes, n, piece.data);
              sum += row_sum(piece.data, n);
            }
            sums.of_part(0)[row] = sum;
          }
        });
  }
  sums.store(*args.bias_grad, args.accumulate_bias_grad != 0, a.factor);
}

void generic_gemm(const te_fl_context& ctx, const Args& args) {
  std::string reason;
  if (!gemm_available(&reason)) backend::unsupported(reason);
  const Layout parts = layout(args);
  if (ctx.workspace_bytes < parts.total()) {
    invalid("the workspace has " + std::to_string(ctx.workspace_bytes) +
            " bytes; workspace() requested " + std::to_string(parts.total()));
  }
  auto* scratch = static_cast<char*>(ctx.workspace);
  const bool direct = is_direct(args);
  const backend::Matrix d = backend::as_matrix(*args.d);
  Product product{.a = stored_matrix(*args.a, args.trans_a != 0, args.trans_a == 0),
                  .b = stored_matrix(*args.b, args.trans_b != 0, args.trans_b != 0),
                  .m = d.rows,
                  .n = d.cols,
                  .k = 0,
                  .alpha = 0.0f,
                  .beta = direct && args.accumulate ? args.beta : 0.0f,
                  .c = direct ? backend::data<float>(*args.d)
                              : reinterpret_cast<float*>(scratch + parts.a + parts.b),
                  .scratch_a = scratch,
                  .scratch_b = scratch + parts.a};
  product.k = product.a.transposed ? product.a.rows : product.a.cols;
  // The scale of an operand without elements may be uninitialised, so 1 is used instead.
  if (product.m * product.k == 0) product.a.factor = 1.0f;
  if (product.n * product.k == 0) product.b.factor = 1.0f;
  const double alpha = static_cast<double>(args.alpha) * product.a.factor * product.b.factor;
  product.alpha = static_cast<float>(alpha);
  if (!std::isfinite(product.alpha)) {
    backend::unsupported("alpha times the operands' scale_inv does not fit in FP32");
  }
  product.run();
  if (!direct) epilogue(args, product.c);
  if (args.bias_grad != nullptr) bias_gradient(args, product.a);
}

std::string describe_choice(const te_fl_context&, const Args& args) {
  std::string reason;
  if (!gemm_available(&reason)) backend::unsupported(reason);
  const OperandType type = operand_type(args);
  const std::string rest = is_direct(args) ? ", written to d: " : ", then one pass into d: ";
  if (!type.bf16) return "oneDNN's FP32 product" + rest + "the operands are not exact in BF16";
  if (!gemm_bf16_is_native())
    return "oneDNN's FP32 product" + rest + "this processor has no fast instructions for BF16";
  if (type.undecided)
    return "oneDNN's BF16 product, or FP32" + rest + "BF16 if the block scales are powers of two";
  return "oneDNN's BF16 product" + rest + "the operands are exact in BF16";
}

// ---- grouped_gemm: the GEMMs of a group run one after the other

Refusal refuse_group(const te_fl_grouped_gemm_args& args) {
  for (int64_t i = 0; i < args.a_count; ++i) {
    const Args product = backend::product_of(args, i);
    if (const Refusal refusal = refuse(product)) return refusal;
    if (product.bias_grad != nullptr && is_block_scaled(*product.a)) {
      return "sums no blocks into bias_grad";
    }
  }
  return nullptr;
}

size_t group_workspace(const te_fl_context& ctx, const te_fl_grouped_gemm_args& args) {
  size_t bytes = 0;
  for (int64_t i = 0; i < args.a_count; ++i)
    bytes = std::max(bytes, workspace(ctx, backend::product_of(args, i)));
  return bytes;
}

void grouped_gemm(const te_fl_context& ctx, const te_fl_grouped_gemm_args& args) {
  for (int64_t i = 0; i < args.a_count; ++i) {
    const Args product = backend::product_of(args, i);
    if (!backend::writes_nothing(product)) generic_gemm(ctx, product);
  }
}

std::string words_of_group(const te_fl_context& ctx, const te_fl_grouped_gemm_args& args) {
  std::string text = std::to_string(args.a_count) + " products one after the other";
  if (args.a_count > 0)
    text += "; the first: " + describe_choice(ctx, backend::product_of(args, 0));
  return text;
}

}  // namespace

void append_gemm(std::vector<te_fl_op_desc>& ops) {
  te_fl_op_desc desc = descriptor<Args, generic_gemm, refuse>("generic_gemm");
  desc.later_args = "residual d_sum";
  desc.flags |= TE_FL_OP_CHEAP_EPILOGUES;
  desc.workspace = backend::workspace_thunk<Args, workspace>;
  desc.describe = backend::describe_thunk<Args, describe_choice>;
  ops.push_back(desc);
  te_fl_op_desc group =
      descriptor<te_fl_grouped_gemm_args, grouped_gemm, refuse_group>("grouped_gemm");
  group.workspace = backend::workspace_thunk<te_fl_grouped_gemm_args, group_workspace>;
  group.describe = backend::describe_thunk<te_fl_grouped_gemm_args, words_of_group>;
  ops.push_back(group);
}

}  // namespace te_fl::cpu
