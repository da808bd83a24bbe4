// Registers an implementation of a catalogue op from C++ and selects it for one op only.
#include <cstdio>

#include "te_fl/backend.hpp"
#include "te_fl/te_fl.hpp"

namespace {

// te-fl has checked the call against the schema (shapes, dtypes, devices) before this runs.
void my_relu(const te_fl_context&, const te_fl_relu_args& args) {
  namespace b = te_fl::backend;
  if (!b::is_contiguous(*args.input) || !b::is_contiguous(*args.output))
    b::unsupported("my relu takes compact tensors only");
  const float* x = b::data<float>(*args.input);
  float* y = b::data<float>(*args.output);
  for (int64_t i = 0, n = b::numel(*args.input); i < n; ++i) y[i] = x[i] < 0 ? 0 : x[i];
}

}  // namespace

int main() {
  const te_fl_op_desc desc{
      .op_name = "relu",
      .impl_id = "vendor.acme_relu",
      .kind = TE_FL_KIND_VENDOR,
      .flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK,
      .dtypes = TE_FL_BIT(TE_FL_F32),
      .scalings = TE_FL_BIT(TE_FL_SCALING_NONE),
      .device_types = uint64_t{1} << TE_FL_DEVICE_CPU,
      .run = te_fl::backend::run_thunk<te_fl_relu_args, my_relu>,
  };
  auto& registry = te_fl::OpManager::instance().registry();
  te_fl::Status status = registry.register_op(desc, "register_in_tree", "acme");
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.to_string().c_str()), 1;

  const float values[] = {-1, 0, 1, 2};
  auto x = te_fl::Tensor::from_values({4}, values);
  auto y = te_fl::Tensor::empty({4}, te_fl::DType::kF32);
  if (!x.ok() || !y.ok()) return 1;

  te_fl::PolicySettings settings;
  settings.per_op["relu"] = {{te_fl::PolicyToken::Type::kVendorName, te_fl::Kind::kVendor, "acme"}};
  {
    te_fl::PolicyScope scope(settings);
    status = te_fl::ops::relu({.input = *x, .output = *y});
  }
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.to_string().c_str()), 1;
  for (const auto& u : te_fl::OpManager::instance().usage()) {
    std::printf("%s: %s, %llu calls\n", u.op.c_str(), u.impl_id.c_str(),
                static_cast<unsigned long long>(u.calls));
  }
  status = registry.unregister_op("relu", "vendor.acme_relu");
  return status.ok() ? 0 : 1;
}
