#include "gemm/gemm_composed.hpp"

#include "gemm/gemm_plan.hpp"
#include "pointwise/activation.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::cuda {
namespace {

using Args = te_fl_generic_gemm_args;

int dtype_of(const te_fl_tensor& t) noexcept { return dtype_index(t.dl.dtype); }
size_t round_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The tensor whose dtype the product is rounded to, or NULL.
const te_fl_tensor* rounded_like(const Args& args) {
  if (args.residual != nullptr || args.accumulate) return nullptr;
  if (args.gelu && args.d_sum != nullptr) return nullptr;  // the op gelu sums no columns
  const te_fl_tensor* t = args.gelu ? args.pre_gelu_out : args.pre_gelu_in;
  if (t == nullptr || t->quant != nullptr) return nullptr;
  // FP32 rounds nothing; of 16 bits D's own rounding has to be no finer.
  const int dtype = dtype_of(*t);
  const bool any = dtype == TE_FL_F32 || args.d->quant != nullptr || dtype_of(*args.d) == dtype;
  return any ? t : nullptr;
}

}  // namespace

Composed::Composed(const Args& call) : call_(call) {
  const te_fl_tensor* rounded = rounded_like(call);
  if (rounded == nullptr) return;
  product_ = call;
  product_.gelu = 0;
  product_.pre_gelu_out = product_.pre_gelu_in = product_.d_sum = nullptr;
  if (forward()) {
    product_.d = rounded;
  } else {
    rounded_ = *rounded;
    rounded_.dl.data = nullptr;
    rounded_.dl.byte_offset = 0;
    product_.d = &rounded_;
  }
  composed_ = true;
}

size_t Composed::product_bytes() const {
  if (forward()) return 0;
  return round_up(static_cast<size_t>(backend::numel(rounded_) * bytes_of(dtype_of(rounded_))));
}

size_t Composed::scratch_bytes() const {
  const backend::Matrix d = backend::as_matrix(*call_.d);
  return product_bytes() + round_up(dbias_dgelu_workspace(d.rows, d.cols));
}

void Composed::bind(void* scratch) {
  scratch_ = static_cast<char*>(scratch);
  if (!forward()) rounded_.dl.data = scratch;
}

void Composed::activate(const te_fl_context& ctx) const {
  te_fl_context own = ctx;
  own.workspace = scratch_ + product_bytes();
  own.workspace_bytes = scratch_bytes() - product_bytes();
  if (forward()) {
    te_fl_activation_act_fwd_args args{};
    args.input = call_.pre_gelu_out;
    args.output = call_.d;
    gelu(own, args);
  } else if (call_.d_sum == nullptr) {
    te_fl_activation_act_bwd_args args{};
    args.grad = &rounded_;
    args.input = call_.pre_gelu_in;
    args.output = call_.d;
    dgelu(own, args);
  } else {
    te_fl_activation_dbias_act_args args{};
    args.grad = &rounded_;
    args.input = call_.pre_gelu_in;
    args.output = call_.d;
    args.dbias = call_.d_sum;
    dbias_dgelu(own, args);
  }
}

}  // namespace te_fl::cuda
