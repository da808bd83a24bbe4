// The dropout ops, with a saved mask of one bit per element.
#include "te_fl/ops/dropout.h"

#include <string>
#include <vector>

#include "element.hpp"
#include "families.hpp"
#include "random.hpp"

namespace te_fl::reference {
namespace {

void dropout_fwd(const te_fl_context& ctx, const te_fl_dropout_fwd_args& a) {
  const int64_t n = backend::numel(*a.input);
  std::vector<double> x = Reader(*a.input).all_double();
  std::vector<float> y(x.size());
  std::vector<uint8_t> bits(static_cast<size_t>((n + 7) / 8), 0);
  DropoutStream stream(*ctx.rng, a.p);
  for (int64_t i = 0; i < n; ++i) {
    const bool keep = stream.keep(static_cast<uint64_t>(i));
    y[i] = keep ? static_cast<float>(x[i] / (1.0 - a.p)) : 0.0f;
    bits[i / 8] |= static_cast<uint8_t>(keep) << (i % 8);
  }
  store_output(*a.output, y.data());
  auto* mask = backend::data<uint8_t>(*a.mask);
  for (size_t i = 0; i < bits.size(); ++i) {
    mask[static_cast<int64_t>(i) * backend::stride(*a.mask, 0)] = bits[i];
  }
}

void dropout_bwd(const te_fl_context&, const te_fl_dropout_bwd_args& a) {
  const int64_t n = backend::numel(*a.grad_output);
  const std::vector<double> dy = Reader(*a.grad_output).all_double();
  const auto* mask = backend::data<const uint8_t>(*a.mask);
  std::vector<float> dx(dy.size());
  for (int64_t i = 0; i < n; ++i) {
    const bool keep = (mask[i / 8 * backend::stride(*a.mask, 0)] >> (i % 8) & 1) != 0;
    dx[i] = keep ? static_cast<float>(dy[i] / (1.0 - a.p)) : 0.0f;
  }
  store_output(*a.grad_input, dx.data());
}

}  // namespace

void append_dropout(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(descriptor<te_fl_dropout_fwd_args, dropout_fwd>("dropout_fwd"));
  ops.push_back(descriptor<te_fl_dropout_bwd_args, dropout_bwd>("dropout_bwd"));
}

}  // namespace te_fl::reference
