#include "gemm/grouped_gemm_choice.hpp"

#include <climits>

#include "te_fl/backend/grouped_gemm.hpp"

namespace te_fl::cuda {
namespace {

using Args = te_fl_generic_gemm_args;

bool is_plain(const te_fl_tensor& t, int dtype) {
  return t.quant == nullptr && dtype_of(t) == dtype &&
         (backend::numel(t) == 0 || aligned16(backend::data<const void>(t)));
}

GroupedForm form_of_bf16(const Problem& p) {
  if (p.a.along) return p.b.along ? GroupedForm::kBf16 : GroupedForm::kBf16AcrossB;
  return p.b.along ? GroupedForm::kLibrary : GroupedForm::kBf16Across;
}
GroupedForm form_of_codes(const Args& c, const Problem& p) {
  if (p.block) {
    const bool taken = p.a.dtype == TE_FL_F8E4M3 && p.b.dtype == TE_FL_F8E4M3 &&
                       backend::scaling(*c.a) == TE_FL_SCALING_BLOCK_1X128;
    if (!taken) return GroupedForm::kLibrary;
    return backend::scaling(*c.b) == TE_FL_SCALING_BLOCK_1X128 ? GroupedForm::kVectors
                                                               : GroupedForm::kBlocks;
  }
  if (p.b.dtype != TE_FL_F8E4M3) return GroupedForm::kLibrary;
  if (p.a.dtype == TE_FL_F8E5M2) return GroupedForm::kGradientCodes;
  return c.use_split_accumulator != 0 ? GroupedForm::kCodesSplit : GroupedForm::kCodes;
}

// Sets `form`, and returns why the kernel does not compute the GEMM; NULL if it does.
const char* refuse_kernel(const Args& c, const Problem& p, GroupedForm& form) {
  if (c.bias_grad != nullptr) return "a bias gradient is requested";
  if (p.convert != Convert::kNone) return "operands that cuBLASLt has to convert";
  if (p.fp8) {
    form = form_of_codes(c, p);
  } else if (is_plain(*c.a, TE_FL_BF16) && is_plain(*c.b, TE_FL_BF16)) {
    form = form_of_bf16(p);
    if (!has_whole_rows(*c.a) || !has_whole_rows(*c.b))
      return "rows of operands that are no whole pieces of 16 bytes";
  }
  if (form == GroupedForm::kLibrary) return "operands that are not BF16 or FP8 as a layer has them";
  if (!is_plain(*c.d, TE_FL_BF16) && !is_plain(*c.d, TE_FL_F32))
    return "a result that is not BF16 or FP32";
  if (p.n % 8 != 0) return "results whose columns are no multiple of 8";
  if (c.bias != nullptr &&
      !(c.bias->quant == nullptr && dtype_of(*c.bias) == TE_FL_BF16 &&
        reinterpret_cast<uintptr_t>(backend::data<const void>(*c.bias)) % 4 == 0))
    return "a bias that is not BF16";
  constexpr int64_t kMost = INT_MAX / 2;
  if (p.m > kMost || p.n > kMost || p.k > kMost) return "an extent beyond 2^30";
  return nullptr;
}

// The most operations of a product, on average, for which the kernel computes kVectors. The scales
// of B take time between the tensor cores' instructions, so cuBLASLt is faster on large products;
// on small ones its host time for each product counts more.
constexpr double kMostVectors = 2e10;

// Numbers of cluster tiles. They cost the same, whether their blocks lie side by side or not.
int64_t count_tiles(const Problem& p, int64_t rows, int64_t cols) {
  return (p.m + rows - 1) / rows * ((p.n + cols - 1) / cols);
}

}  // namespace

GroupedPath choose_grouped_gemm(const te_fl_grouped_gemm_args& args, const GemmDevice& device) {
  GroupedPath path;
  if (device.architecture != kFusedArchitecture) {
    path.unfit = "the kernel is for GPUs of compute capability 9.0 (Hopper)";
    return path;
  }
  if (!device.has_tensor_maps) {
    path.unfit = "the driver has no tensor maps";
    return path;
  }
  int64_t wide = 0, tall = 0;
  double operations = 0;
  GroupedForm common = GroupedForm::kLibrary;
  for (int64_t i = 0; i < args.a_count; ++i) {
    const Args product = backend::product_of(args, i);
    const Problem p = make_problem(product);
    GroupedForm form = GroupedForm::kLibrary;
    path.unfit = refuse_kernel(product, p, form);
    if (path.unfit != nullptr) return path;
    if (i > 0 && form != common) {
      path.unfit = "operands of several kinds in one group";
      return path;
    }
    if (i > 0 && dtype_of(*product.d) != dtype_of(*args.d[0])) {
      path.unfit = "results of several dtypes";
      return path;
    }
    common = form;
    const int64_t lines = std::max<int64_t>(1, p.k / (p.fp8 ? 128 : 64));
    operations +=
        2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
    wide += lines * count_tiles(p, 128, 512);
    tall += lines * count_tiles(p, 256, 256);
  }
  if (wide == 0) {
    path.unfit = "there is nothing to compute";
    return path;
  }
  if (common == GroupedForm::kVectors &&
      operations > kMostVectors * static_cast<double>(args.a_count)) {
    path.unfit =
        "both operands are scaled by 1x128, and products this large are faster in cuBLASLt";
    return path;
  }
  path.form = common;
  path.wide = wide < tall;
  return path;
}

}  // namespace te_fl::cuda
