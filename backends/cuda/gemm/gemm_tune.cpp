#include "gemm/gemm_tune.hpp"

#include <optional>

#include "common/dtype_bytes.hpp"
#include "device/cuda_check.hpp"
#include "device/device_memory.hpp"
#include "gemm/cublaslt.hpp"
#include "gemm/gemm_algorithm.hpp"
#include "gemm/gemm_compare.hpp"
#include "gemm/gemm_space.hpp"

namespace te_fl::cuda {
namespace {

using Args = te_fl_generic_gemm_args;

// The results of an algorithm: D, and its amax or the bias gradient.
struct Results {
  DeviceMemory d, side;
  Results(size_t d_bytes, size_t side_bytes, cudaStream_t stream)
      : d(d_bytes, stream), side(side_bytes, stream) {}
};

class Trial {
 public:
  Trial(const te_fl_context& ctx, const Args& args, const Problem& p, Matmul& matmul)
      : ctx_(ctx),
        args_(args),
        p_(p),
        matmul_(matmul),
        stream_(static_cast<cudaStream_t>(ctx.stream)),
        dtype_(p.direct ? dtype_of(*args.d) : TE_FL_F32),
        adds_(p.direct && args.residual != nullptr),
        accumulates_(p.direct && args.accumulate),
        library_(kLibraryWorkspace, stream_),
        results_(d_bytes(), side_bytes(), stream_) {
    if (p.codes) point(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, results_.side.get());
    if (p.bias_grad) point(CUBLASLT_MATMUL_DESC_BIAS_POINTER, results_.side.get());
    clear();
  }

  bool run(const cublasLtMatmulAlgo_t& algo) {
    const void* left = p_.fp8 ? p_.b.codes : backend::data<const void>(*args_.b);
    const void* right = p_.fp8 ? p_.a.codes : backend::data<const void>(*args_.a);
    const void* added = adds_      ? backend::data<const void>(*args_.residual)
                        : p_.codes ? nullptr
                                   : results_.d.get();
    const float beta = adds_ || accumulates_ ? 1.0f : 0.0f;
    return cublaslt()->matmul(cublaslt_handle(ctx_.device.index), &matmul_.desc, &args_.alpha, left,
                              &matmul_.left, right, &matmul_.right, &beta, added, matmul_.addend(),
                              results_.d.get(), &matmul_.out, &algo, library_.get(),
                              kLibraryWorkspace, stream_) == CUBLAS_STATUS_SUCCESS;
  }

  // True if both algorithms write the same results.
  bool agree(const cublasLtMatmulAlgo_t& first, const cublasLtMatmulAlgo_t& other) {
    if (!expected_.has_value()) {
      clear();
      if (!run(first)) return false;
      expected_.emplace(d_bytes(), side_bytes(), stream_);
      copy(results_.d, expected_->d);
      copy(results_.side, expected_->side);
    }
    clear();
    if (!run(other)) return false;
    const float share = p_.fp8 ? kFp8Tolerance : kTolerance;
    const int64_t sides = p_.codes ? 1 : p_.bias_grad ? p_.m : 0;
    return results_agree(expected_->d.get(), results_.d.get(), p_.m * p_.padded_n, dtype_, share,
                         stream_) &&
           results_agree(expected_->side.get(), results_.side.get(), sides,
                         p_.codes ? TE_FL_F32 : dtype_, share, stream_);
  }

 private:
  size_t d_bytes() const { return static_cast<size_t>(p_.m * p_.padded_n * bytes_of(dtype_)); }
  size_t side_bytes() const {
    return p_.bias_grad ? static_cast<size_t>(p_.m * bytes_of(dtype_)) : sizeof(float);
  }
  void point(cublasLtMatmulDescAttributes_t attribute, const void* to) {
    check(cublaslt()->desc_set(&matmul_.desc, attribute, &to, sizeof to),
          "cublasLtMatmulDescSetAttribute", to_text(args_, p_));
  }
  // Fills the results with bytes that are NaN in every dtype, so that unwritten elements are
  // detected. D is zeroed if the product accumulates into it, and the amax is zeroed always.
  void clear() {
    check(cudaMemsetAsync(results_.d.get(), accumulates_ ? 0 : 0xFF, results_.d.bytes(), stream_),
          "cudaMemsetAsync");
    check(cudaMemsetAsync(results_.side.get(), p_.codes ? 0 : 0xFF, results_.side.bytes(), stream_),
          "cudaMemsetAsync");
  }
  void copy(const DeviceMemory& from, const DeviceMemory& to) {
    check(cudaMemcpyAsync(to.get(), from.get(), to.bytes(), cudaMemcpyDeviceToDevice, stream_),
          "cudaMemcpyAsync");
  }

  const te_fl_context& ctx_;
  const Args& args_;
  const Problem& p_;
  Matmul& matmul_;
  const cudaStream_t stream_;
  const int dtype_;  // dtype of D
  const bool adds_, accumulates_;
  const DeviceMemory library_;
  const Results results_;
  std::optional<Results> expected_;
};

// True if variations of the heuristic's algorithms are tried: for kinds of GEMM that cuBLASLt's
// check is known to handle, and for operands aligned to 16 bytes. The check ignores alignment, but
// Hopper's TMA needs 16 bytes.
bool varies(const Args& args, const Problem& p, uint32_t alignment) {
  constexpr uint32_t kCopyEngine = 16;
  const bool sixteen_bits = bytes_of(dtype_of(*args.d)) == 2;
  return alignment >= kCopyEngine && p.direct && sixteen_bits && !p.block && !p.bias_grad &&
         bytes_of(p.a.dtype) <= 2;
}

std::optional<GemmChoice> measured(const te_fl_context& ctx, const Args& args, const Problem& p,
                                   Matmul& matmul, const std::string& key,
                                   std::vector<cublasLtMatmulAlgo_t> candidates,
                                   uint32_t alignment) {
  const size_t named = candidates.size();
  if (varies(args, p, alignment)) {
    add_variations({cublaslt_handle(ctx.device.index), &matmul.desc, &matmul.left, &matmul.right,
                    matmul.addend(), &matmul.out, kLibraryWorkspace},
                   candidates);
  }
  Trial trial(ctx, args, p, matmul);
  const auto run = [&](const cublasLtMatmulAlgo_t& algo) { return trial.run(algo); };
  const auto agrees = [&](size_t i) {
    return i < named || trial.agree(candidates[0], candidates[i]);
  };
  return time_candidates(ctx.device.index, key, candidates, {run, agrees},
                         static_cast<cudaStream_t>(ctx.stream));
}

}  // namespace

cublasLtMatmulAlgo_t tune_gemm(const te_fl_context& ctx, const Args& args, const Problem& p,
                               Matmul& matmul, const std::string& key,
                               std::vector<cublasLtMatmulAlgo_t> heuristic, uint32_t alignment) {
  const cublasLtMatmulAlgo_t first = heuristic.front();
  try {
    return measured_gemm_choice(ctx.device.index, key, first, [&] {
      return measured(ctx, args, p, matmul, key, std::move(heuristic), alignment);
    });
  } catch (const backend::Error& e) {
    const te_fl_status code = TE_FL_STATUS_CODE(e.status());
    if (code == TE_FL_DEVICE_LOST || code == TE_FL_FAILED_PRECONDITION) throw;
    warn_not_measured(key, e.what());
  } catch (const std::exception& e) {
    warn_not_measured(key, e.what());
  }
  return first;
}

}  // namespace te_fl::cuda
