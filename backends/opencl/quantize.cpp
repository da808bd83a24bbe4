// Per-tensor FP8: quantisation with delayed and current scaling, and dequantisation.
#include "te_fl/ops/quantize.h"

#include "families.hpp"
#include "overlap.hpp"
#include "store.hpp"

namespace te_fl::opencl {
namespace {

int64_t type_of(const te_fl_tensor* t) { return dtype_index(t->dl.dtype); }

void quantize(const DeviceCall& call, const te_fl_quantize_args& args) {
  quantise(call, backend::data<const void>(*args.input), type_of(args.input), *args.output,
           *args.output->quant, call.context.workspace, args.noop_flag);
}

void bgrad_quantize(const DeviceCall& call, const te_fl_bgrad_quantize_args& args) {
  const backend::Matrix m = backend::as_matrix(*args.input);
  Launch(call.device, call.stream(), "quantize",
         define("TX", args.input) + define("TY", args.bias_grad) + define("GROUP", kGroup),
         "column_sums")
      .data(args.input)
      .data(args.bias_grad)
      .value(m.rows)
      .value(m.cols)
      .items(m.cols);
  quantise(call, backend::data<const void>(*args.input), type_of(args.input), *args.output,
           *args.output->quant, call.context.workspace, nullptr);
}

// Describes the output as a quantised tensor with a supplied scale; the op passes its parts as
// separate tensors.
void cast_to_fp8(const DeviceCall& call, const te_fl_cast_to_fp8_args& args) {
  te_fl_quant quant;
  quant.scaling = TE_FL_SCALING_TENSOR;
  quant.scale = backend::data<float>(*args.scale);
  quant.amax = args.amax != nullptr ? backend::data<float>(*args.amax) : nullptr;
  quant.scale_inv = args.scale_inv != nullptr ? backend::data<float>(*args.scale_inv) : nullptr;
  quantise(call, backend::data<const void>(*args.input), type_of(args.input), *args.output, quant,
           call.context.workspace, nullptr);
}

void dequantize(const DeviceCall& call, const te_fl_dequantize_args& args) {
  const te_fl_quant& quant = *args.input->quant;
  const backend::Matrix m = backend::as_matrix(*args.output);
  const bool rows = args.input->dl.data != nullptr;
  Launch(call.device, call.stream(), "quantize",
         define("TX", args.input) + define("TY", args.output) + define("GROUP", kGroup),
         "dequantize")
      .memory(rows ? backend::data<const void>(*args.input) : quant.columnwise_data)
      .data(args.output)
      .value(m.rows)
      .value(m.cols)
      .memory(quant.scale_inv)
      .value<int32_t>(rows ? 0 : 1)
      .items(m.rows * m.cols);
}

void compute_amax(const DeviceCall& call, const te_fl_compute_amax_args& args) {
  void* state = call.context.workspace;
  find_amax(call, backend::data<const void>(*args.input), type_of(args.input),
            backend::numel(*args.input), state);
  Launch(call.device, call.stream(), "quantize",
         define("TX", args.input) + define("TY", TE_FL_F32) + define("GROUP", kGroup), "store_amax")
      .memory(state)
      .data(args.amax)
      .groups(1, 1);
}

void fp8_transpose(const DeviceCall& call, const te_fl_fp8_transpose_args& args) {
  const backend::Matrix m = backend::as_matrix(*args.input);
  Launch(call.device, call.stream(), "quantize",
         define("TX", TE_FL_F32) + define("TY", TE_FL_F32) + define("GROUP", kGroup),
         "transpose_codes")
      .data(args.input)
      .data(args.output)
      .value(m.rows)
      .value(m.cols)
      .items(m.rows * m.cols);
}

// ---- calls that are refused

Refusal refuse_quantize(const Device& device, const te_fl_quantize_args& args) {
  if (!all_dense(args.input)) return kNotContiguous;
  return overlaps(*args.output, args.input) ? kOverlaps : refuse_output(device, *args.output);
}
Refusal refuse_bgrad(const Device& device, const te_fl_bgrad_quantize_args& args) {
  if (!all_dense(args.input, args.bias_grad)) return kNotContiguous;
  return overlaps(*args.output, args.input) ? kOverlaps : refuse_output(device, *args.output);
}
Refusal refuse_cast(const Device& device, const te_fl_cast_to_fp8_args& args) {
  if (!all_dense(args.input)) return kNotContiguous;
  return overlaps(*args.output, args.input) ? kOverlaps : refuse_output(device, *args.output);
}
Refusal refuse_dequantize(const te_fl_dequantize_args& args) {
  if (!all_dense(args.input, args.output)) return kNotContiguous;
  return overlaps(*args.output, args.input) ? kOverlaps : nullptr;
}
Refusal refuse_amax(const te_fl_compute_amax_args& args) {
  return all_dense(args.input) ? nullptr : kNotContiguous;
}
Refusal refuse_transpose(const te_fl_fp8_transpose_args& args) {
  if (!all_dense(args.input, args.output)) return kNotContiguous;
  return overlaps(*args.output, args.input) ? kOverlaps : nullptr;
}

template <class Args>
size_t state_only(const Args&) {
  return kState;
}

template <class Args, auto F, auto Refuses>
void append(Ops& ops, const char* name) {
  ops.push_back(descriptor<Args, F, Refuses, state_only<Args>>(name));
}

}  // namespace

void append_quantize(Ops& ops) {
  append<te_fl_quantize_args, quantize, refuse_quantize>(ops, "quantize");
  append<te_fl_bgrad_quantize_args, bgrad_quantize, refuse_bgrad>(ops, "bgrad_quantize");
  append<te_fl_cast_to_fp8_args, cast_to_fp8, refuse_cast>(ops, "cast_to_fp8");
  append<te_fl_compute_amax_args, compute_amax, refuse_amax>(ops, "compute_amax");
  ops.push_back(descriptor<te_fl_dequantize_args, dequantize, refuse_dequantize>("dequantize"));
  ops.push_back(
      descriptor<te_fl_fp8_transpose_args, fp8_transpose, refuse_transpose>("fp8_transpose"));
}

}  // namespace te_fl::opencl
