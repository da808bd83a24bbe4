#include "gemm/gemm_composed.hpp"

#include "common/dtype_bytes.hpp"
#include "pointwise/activation.hpp"

namespace te_fl::cuda {
namespace {

size_t round_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

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
