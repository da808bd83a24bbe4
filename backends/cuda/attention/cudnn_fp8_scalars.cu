#include "attention/cudnn_fp8_scalars.hpp"
#include "common/element.cuh"

namespace te_fl::cuda {
namespace {

__device__ void begin_output(const Fp8Output& out) {
  if (out.scale_inv != nullptr) *out.scale_inv = 1.0f / *out.scale;
}
__device__ void end_output(const Fp8Output& out, float found) {
  if (out.amax != nullptr) *out.amax = fmaxf(*out.amax, found);
}

__global__ void begin_kernel(Fp8Job job) {
  Fp8Scratch& s = *job.scratch;
  s = {};
  s.scale_p = fminf(*job.p.scale, job.most_scale_p);
  s.inverse_p = 1.0f / s.scale_p;
  begin_output(job.p);
  if (job.ds.scale != nullptr) {
    s.scale_ds = *job.ds.scale / job.scale;
    s.inverse_ds = job.scale / *job.ds.scale;
    begin_output(job.ds);
  }
  for (int i = 0; i < job.count; ++i) begin_output(job.outputs[i]);
}

__global__ void end_kernel(Fp8Job job) {
  const Fp8Scratch& s = *job.scratch;
  end_output(job.p, s.amax_p);
  end_output(job.ds, s.amax_ds / job.scale);
  for (int i = 0; i < job.count; ++i) end_output(job.outputs[i], s.amax[i]);
}

}  // namespace

void fp8_begin(cudaStream_t stream, const Fp8Job& job) {
  begin_kernel<<<1, 1, 0, stream>>>(job);
  check_launch("begin_kernel");
}
void fp8_end(cudaStream_t stream, const Fp8Job& job) {
  end_kernel<<<1, 1, 0, stream>>>(job);
  check_launch("end_kernel");
}

}  // namespace te_fl::cuda
