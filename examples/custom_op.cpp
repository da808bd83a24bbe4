// Registers and calls an op outside the catalogue: argument struct, schema, implementation, call. A
// plugin passes the schema as te_fl_op_desc.schema instead.
#include <cstddef>
#include <cstdio>

#include "te_fl/backend.hpp"
#include "te_fl/te_fl.hpp"

namespace {

struct axpy_args {
  uint32_t struct_size = sizeof(axpy_args);
  const te_fl_tensor* x = nullptr;
  const te_fl_tensor* y = nullptr;
  float a = 1;
};

constexpr te_fl_arg_desc tensor_argument(const char* name, uint8_t role, uint32_t offset) {
  te_fl_arg_desc d{};
  d.struct_size = sizeof d;
  d.type = TE_FL_ARG_TENSOR;
  d.role = role;
  d.offset = offset;
  d.dtypes = TE_FL_BIT(TE_FL_F32);
  d.scalings = TE_FL_BIT(TE_FL_SCALING_NONE);
  d.name = name;
  d.shape = "...";
  return d;
}

constexpr te_fl_arg_desc scalar_argument(const char* name, uint32_t offset, double neutral) {
  te_fl_arg_desc d{};
  d.struct_size = sizeof d;
  d.type = TE_FL_ARG_F32;
  d.offset = offset;
  d.name = name;
  d.neutral = neutral;
  return d;
}

constexpr te_fl_arg_desc kX = tensor_argument("x", TE_FL_IN, offsetof(axpy_args, x));
constexpr te_fl_arg_desc kY = tensor_argument("y", TE_FL_INOUT, offsetof(axpy_args, y));
constexpr te_fl_arg_desc kA = scalar_argument("a", offsetof(axpy_args, a), 1);
constexpr const te_fl_arg_desc* kArgs[] = {&kX, &kY, &kA};
constexpr te_fl_op_schema kSchema = {
    .args_size = sizeof(axpy_args),
    .least_args_size = offsetof(axpy_args, a) + sizeof(float),
    .arg_count = 3,
    .args = kArgs,
    .name = "acme::axpy",
    .summary = "Adds a multiple of one tensor to another.",
    .formula = "y = y + a x",
    .source = "BLAS",
};

void axpy(const te_fl_context&, const axpy_args& args) {
  namespace b = te_fl::backend;
  if (!b::is_contiguous(*args.x) || !b::is_contiguous(*args.y))
    b::unsupported("acme::axpy takes compact tensors only");
  const float* x = b::data<float>(*args.x);
  float* y = b::data<float>(*args.y);
  for (int64_t i = 0, n = b::numel(*args.x); i < n; ++i) y[i] += args.a * x[i];
}

}  // namespace

int main() {
  const te_fl_op_desc desc{
      .op_name = "acme::axpy",
      .impl_id = "reference.acme",
      .kind = TE_FL_KIND_REFERENCE,
      .flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC,
      .device_types = uint64_t{1} << TE_FL_DEVICE_CPU,
      .run = te_fl::backend::run_thunk<axpy_args, axpy>,
      .schema = &kSchema,
  };
  auto& manager = te_fl::OpManager::instance();
  te_fl::Status status = manager.registry().register_op(desc, "custom_op", "acme");
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.to_string().c_str()), 1;

  const float xs[] = {1, 2, 3}, ys[] = {10, 20, 30};
  auto x = te_fl::Tensor::from_values({3}, xs);
  auto y = te_fl::Tensor::from_values({3}, ys);
  auto wrong = te_fl::Tensor::empty({4}, te_fl::DType::kF32);
  if (!x.ok() || !y.ok() || !wrong.ok()) return 1;

  const axpy_args mistaken{.x = *x, .y = *wrong};
  std::printf("with a wrong shape: %s\n",
              manager.call("acme::axpy", &mistaken).to_string().c_str());
  const axpy_args args{.x = *x, .y = *y, .a = 2};
  status = manager.call("acme::axpy", &args);
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.to_string().c_str()), 1;
  std::printf("y = %g %g %g\n", y->data<float>()[0], y->data<float>()[1], y->data<float>()[2]);
  return y->data<float>()[2] == 36 ? 0 : 1;
}
