// The table: every op of the catalogue.
#include "bench/cases/case.hpp"
#include "te_fl/ops/activation.h"
#include "te_fl/ops/attention.h"
#include "te_fl/ops/dropout.h"
#include "te_fl/ops/gemm.h"
#include "te_fl/ops/norm.h"
#include "te_fl/ops/optimizer.h"
#include "te_fl/ops/quantize.h"
#include "te_fl/ops/rope.h"
#include "te_fl/ops/softmax.h"
#include "te_fl/ops/tensor.h"

namespace te_fl::bench {
namespace {

using Cases = std::vector<CaseSpec>;

// What the extents of the rows from `first` on are called, and what they are unless asked for: on
// the host, and on an accelerator.
void describe(Cases& cases, size_t first, const char* axes, const Shape& extents,
              const Shape& large) {
  for (size_t i = first; i < cases.size(); ++i) {
    cases[i].axes = axes, cases[i].extents = extents, cases[i].large = large;
  }
}

template <class Build>
void both_dtypes(Cases& cases, const std::string& op, Build build) {
  for (int dtype : {TE_FL_F32, TE_FL_BF16}) {
    cases.push_back({op, dtype == TE_FL_F32 ? "f32" : "bf16",
                     [build, dtype](Case& c, int64_t rows) { build(c, rows, dtype); }});
  }
}

void activations(Cases& cases) {
  for (const char* op : {"gelu", "qgelu", "relu", "srelu", "silu"}) {
    both_dtypes(cases, op, [](Case& c, int64_t rows, int dtype) {
      auto& a = c.args<te_fl_activation_act_fwd_args>();
      a.input = c.in({rows, c.cols()}, dtype), a.output = c.out({rows, c.cols()}, dtype);
    });
  }
  for (const char* op : {"geglu", "qgeglu", "reglu", "sreglu", "swiglu", "glu"}) {
    both_dtypes(cases, op, [](Case& c, int64_t rows, int dtype) {
      auto& a = c.args<te_fl_activation_glu_fwd_args>();
      a.input = c.in({rows, 2 * c.cols()}, dtype), a.output = c.out({rows, c.cols()}, dtype);
    });
  }
  both_dtypes(cases, "clamped_swiglu", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_activation_clamped_fwd_args>();
    a.input = c.in({rows, 2 * c.cols()}, dtype), a.output = c.out({rows, c.cols()}, dtype);
  });
  for (const char* op : {"dgelu", "dqgelu", "drelu", "dsrelu", "dsilu"}) {
    both_dtypes(cases, op, [](Case& c, int64_t rows, int dtype) {
      auto& a = c.args<te_fl_activation_act_bwd_args>();
      a.grad = c.in({rows, c.cols()}, dtype), a.input = c.in({rows, c.cols()}, dtype);
      a.output = c.out({rows, c.cols()}, dtype);
    });
  }
  const auto gated = [](auto& a, Case& c, int64_t rows, int dtype) {
    a.grad = c.in({rows, c.cols()}, dtype), a.input = c.in({rows, 2 * c.cols()}, dtype);
    a.output = c.out({rows, 2 * c.cols()}, dtype);
  };
  for (const char* op : {"dgeglu", "dqgeglu", "dreglu", "dsreglu", "dswiglu", "dglu"}) {
    both_dtypes(cases, op, [gated](Case& c, int64_t rows, int dtype) {
      gated(c.args<te_fl_activation_glu_bwd_args>(), c, rows, dtype);
    });
  }
  both_dtypes(cases, "clamped_dswiglu", [gated](Case& c, int64_t rows, int dtype) {
    gated(c.args<te_fl_activation_clamped_bwd_args>(), c, rows, dtype);
  });
  for (const char* op :
       {"dbias_dgelu", "dbias_dsilu", "dbias_drelu", "dbias_dqgelu", "dbias_dsrelu"}) {
    both_dtypes(cases, op, [](Case& c, int64_t rows, int dtype) {
      auto& a = c.args<te_fl_activation_dbias_act_args>();
      a.grad = c.in({rows, c.cols()}, dtype), a.input = c.in({rows, c.cols()}, dtype);
      a.output = c.out({rows, c.cols()}, dtype), a.dbias = c.out({c.cols()}, dtype);
    });
  }
}

void norms(Cases& cases) {
  both_dtypes(cases, "layernorm_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_layernorm_fwd_args>();
    a.x = c.in({rows, c.cols()}, dtype), a.gamma = c.in({c.cols()}, dtype);
    a.beta = c.in({c.cols()}, dtype), a.z = c.out({rows, c.cols()}, dtype);
    a.mu = c.out({rows}, TE_FL_F32), a.rsigma = c.out({rows}, TE_FL_F32);
  });
  const auto backward = [](auto& a, Case& c, int64_t rows, int dtype) {
    a.dz = c.in({rows, c.cols()}, dtype), a.x = c.in({rows, c.cols()}, dtype);
    a.rsigma = c.in({rows}, TE_FL_F32), a.gamma = c.in({c.cols()}, dtype);
    a.dx = c.out({rows, c.cols()}, dtype), a.dgamma = c.out({c.cols()}, dtype);
  };
  both_dtypes(cases, "layernorm_bwd", [backward](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_layernorm_bwd_args>();
    backward(a, c, rows, dtype);
    a.mu = c.in({rows}, TE_FL_F32), a.dbeta = c.out({c.cols()}, dtype);
  });
  both_dtypes(cases, "rmsnorm_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_rmsnorm_fwd_args>();
    a.x = c.in({rows, c.cols()}, dtype), a.gamma = c.in({c.cols()}, dtype);
    a.z = c.out({rows, c.cols()}, dtype), a.rsigma = c.out({rows}, TE_FL_F32);
  });
  both_dtypes(cases, "rmsnorm_bwd", [backward](Case& c, int64_t rows, int dtype) {
    backward(c.args<te_fl_rmsnorm_bwd_args>(), c, rows, dtype);
  });
  both_dtypes(cases, "rmsnorm_bwd_add", [backward](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_rmsnorm_bwd_add_args>();
    backward(a, c, rows, dtype);
    a.add = c.in({rows, c.cols()}, dtype);
  });
}

void quantisation(Cases& cases) {
  struct Mode {
    const char* name;
    te_fl_scaling scaling;
    bool columnwise;
    uint32_t flags;
  };
  const Mode modes[] = {
      {"bf16 delayed", TE_FL_SCALING_TENSOR, false, 0},
      {"bf16 delayed, both copies", TE_FL_SCALING_TENSOR, true, 0},
      {"bf16 current", TE_FL_SCALING_TENSOR, false, TE_FL_QUANT_COMPUTE_SCALE},
      {"bf16 1x128", TE_FL_SCALING_BLOCK_1X128, false, TE_FL_QUANT_POW2_SCALE},
      {"bf16 128x128", TE_FL_SCALING_BLOCK_128X128, false, TE_FL_QUANT_POW2_SCALE},
      {"bf16 mxfp8", TE_FL_SCALING_MXFP8, false, 0},
  };
  for (const Mode& mode : modes) {
    cases.push_back({"quantize", mode.name, [mode](Case& c, int64_t rows) {
                       auto& a = c.args<te_fl_quantize_args>();
                       a.input = c.in({rows, c.cols()}, TE_FL_BF16);
                       // A scale from the data itself takes a second pass over it.
                       if (mode.flags == TE_FL_QUANT_COMPUTE_SCALE) c.bytes *= 2;
                       a.output = c.fp8({rows, c.cols()}, TE_FL_F8E4M3, mode.scaling,
                                        mode.columnwise, mode.flags);
                     }});
  }
  cases.push_back({"dequantize", "bf16", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_dequantize_args>();
                     a.input = c.fp8({rows, c.cols()}, TE_FL_F8E4M3);
                     a.output = c.out({rows, c.cols()}, TE_FL_BF16);
                   }});
  cases.push_back({"bgrad_quantize", "bf16", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_bgrad_quantize_args>();
                     a.input = c.in({rows, c.cols()}, TE_FL_BF16);
                     a.output = c.fp8({rows, c.cols()}, TE_FL_F8E5M2);
                     a.bias_grad = c.out({c.cols()}, TE_FL_BF16);
                   }});
  cases.push_back({"multi_tensor_quantize", "bf16, 8 tensors", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_multi_tensor_quantize_args>();
                     std::vector<const te_fl_tensor*> in, out;
                     for (int i = 0; i < 8; ++i) {
                       in.push_back(c.in({(rows + 7) / 8, c.cols()}, TE_FL_BF16));
                       out.push_back(c.fp8({(rows + 7) / 8, c.cols()}, TE_FL_F8E4M3));
                     }
                     a.inputs = c.list(in), a.inputs_count = 8;
                     a.outputs = c.list(out), a.outputs_count = 8;
                   }});
  cases.push_back({"split_quantize", "bf16, 4 parts", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_split_quantize_args>();
                     const int64_t part = (rows + 3) / 4;
                     a.input = c.in({4 * part, c.cols()}, TE_FL_BF16);
                     std::vector<const te_fl_tensor*> out;
                     for (int i = 0; i < 4; ++i)
                       out.push_back(c.fp8({part, c.cols()}, TE_FL_F8E4M3));
                     a.outputs = c.list(out), a.outputs_count = 4;
                   }});
  cases.push_back({"cast_to_fp8", "bf16", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_cast_to_fp8_args>();
                     a.input = c.in({rows, c.cols()}, TE_FL_BF16);
                     a.output = c.out({rows, c.cols()}, TE_FL_F8E4M3);
                     a.scale = c.in({1}, TE_FL_F32), a.amax = c.inout({1}, TE_FL_F32);
                     a.scale_inv = c.out({1}, TE_FL_F32);
                   }});
  cases.push_back({"fp8_transpose", "e4m3", [](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_fp8_transpose_args>();
                     a.input = c.in({rows, c.cols()}, TE_FL_F8E4M3);
                     a.output = c.out({c.cols(), rows}, TE_FL_F8E4M3);
                   }});
  both_dtypes(cases, "compute_amax", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_compute_amax_args>();
    a.input = c.in({rows, c.cols()}, dtype), a.amax = c.out({1}, TE_FL_F32);
  });
  cases.push_back({"fused_amax_and_scale_update_after_reduction",
                   "64 histories of 1024",
                   [](Case& c, int64_t) {
                     auto& a = c.args<te_fl_fused_amax_and_scale_update_after_reduction_args>();
                     a.amax_reduction_buffer = c.in({256}, TE_FL_F32);
                     std::vector<const te_fl_tensor*> histories, scales;
                     for (int i = 0; i < 64; ++i) {
                       histories.push_back(c.inout({1024, 4}, TE_FL_F32));
                       scales.push_back(c.inout({4}, TE_FL_F32));
                     }
                     a.amax_histories = c.list(histories), a.amax_histories_count = 64;
                     a.scales = c.list(scales), a.scales_count = 64;
                   },
                   false,
                   1,
                   "",
                   {1},
                   {1}});
}

void optimizers(Cases& cases) {
  constexpr int kTensors = 24;
  // Rows of a tensor: in sixteens, as weights have them.
  const auto rows_each = [](int64_t rows) {
    return (rows + 16 * kTensors - 1) / (16 * kTensors) * 16;
  };
  const auto many = [rows_each](Case& c, int64_t rows, int dtype, bool both) {
    std::vector<const te_fl_tensor*> list;
    for (int i = 0; i < kTensors; ++i) {
      const Shape shape = {rows_each(rows), c.cols()};
      list.push_back(both ? c.inout(shape, dtype) : c.in(shape, dtype));
    }
    return c.list(list);
  };
  const auto adam = [many](Case& c, int64_t rows, bool low) {
    auto& a = c.args<te_fl_multi_tensor_adam_args>();
    const int dtype = low ? TE_FL_BF16 : TE_FL_F32;
    a.grads = many(c, rows, dtype, false), a.grads_count = kTensors;
    a.params = many(c, rows, dtype, !low), a.params_count = kTensors;
    a.exp_avgs = many(c, rows, TE_FL_F32, true), a.exp_avgs_count = kTensors;
    a.exp_avg_sqs = many(c, rows, TE_FL_F32, true), a.exp_avg_sqs_count = kTensors;
    if (low) {
      a.master_params = many(c, rows, TE_FL_F32, true), a.master_params_count = kTensors;
    }
    for (int i = 0; i < kTensors; ++i) {  // v is a mean of squares
      const te_fl_tensor& v = *a.exp_avg_sqs[i];
      float* x = static_cast<float*>(v.dl.data);
      for (int64_t e = 0; e < v.dl.shape[0] * v.dl.shape[1]; ++e) x[e] *= x[e];
    }
    a.lr = 1e-3f, a.weight_decay = 0.1f, a.mode = TE_FL_ADAM_MODE_ADAMW;
    return &a;
  };
  cases.push_back(
      {"multi_tensor_adam", "f32", [adam](Case& c, int64_t rows) { adam(c, rows, false); }});
  cases.push_back({"multi_tensor_adam", "bf16, f32 master",
                   [adam](Case& c, int64_t rows) { adam(c, rows, true); }});
  cases.push_back({"multi_tensor_adam", "bf16, f32 master, fp8 copies",
                   [adam, rows_each](Case& c, int64_t rows) {
                     auto* a = adam(c, rows, true);
                     std::vector<const te_fl_tensor*> copies;
                     const Shape shape = {rows_each(rows), c.cols()};
                     for (int i = 0; i < kTensors; ++i) {
                       copies.push_back(c.fp8(shape, TE_FL_F8E4M3, TE_FL_SCALING_TENSOR, true));
                     }
                     a->fp8_params = c.list(copies), a->fp8_params_count = kTensors;
                   }});
  cases.push_back({"multi_tensor_sgd", "f32, momentum", [many](Case& c, int64_t rows) {
                     auto& a = c.args<te_fl_multi_tensor_sgd_args>();
                     a.grads = many(c, rows, TE_FL_F32, false), a.grads_count = kTensors;
                     a.params = many(c, rows, TE_FL_F32, true), a.params_count = kTensors;
                     a.momentums = many(c, rows, TE_FL_F32, true), a.momentums_count = kTensors;
                     a.lr = 1e-3f, a.momentum = 0.9f;
                   }});
  both_dtypes(cases, "multi_tensor_scale", [many](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_multi_tensor_scale_args>();
    a.inputs = many(c, rows, dtype, false), a.inputs_count = kTensors;
    a.outputs = many(c, rows, dtype, false), a.outputs_count = kTensors;
    a.noop_flag = c.inout({1}, TE_FL_I32), a.scale = 0.5f;
  });
  both_dtypes(cases, "multi_tensor_l2norm", [many](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_multi_tensor_l2norm_args>();
    a.inputs = many(c, rows, dtype, false), a.inputs_count = kTensors;
    a.norm = c.out({1}, TE_FL_F32), a.per_tensor_norms = c.out({kTensors}, TE_FL_F32);
  });
  both_dtypes(cases, "multi_tensor_unscale_l2norm", [many](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_multi_tensor_unscale_l2norm_args>();
    a.inputs = many(c, rows, dtype, false), a.inputs_count = kTensors;
    a.inv_scale = c.in({1}, TE_FL_F32), a.norm = c.out({1}, TE_FL_F32);
  });
}

void softmaxes(Cases& cases) {
  const size_t first = cases.size();
  const auto square = [](Case& c, int64_t rows) {
    return Shape{(rows + c.cols() - 1) / c.cols(), c.cols(), c.cols()};
  };
  const auto scores = [square](Case& c, int64_t rows) {
    Shape shape = square(c, rows);
    shape.insert(shape.begin(), 1);
    return shape;
  };
  const auto forward = [](auto& a, Case& c, const Shape& shape, int dtype) {
    a.input = c.in(shape, dtype), a.output = c.out(shape, dtype), a.scale = 0.125f;
  };
  const auto backward = [](auto& a, Case& c, const Shape& shape, int dtype) {
    a.output_grad = c.in(shape, dtype), a.softmax_results = c.in(shape, dtype);
    a.input_grad = c.out(shape, dtype), a.scale = 0.125f;
  };
  for (const char* op :
       {"scaled_softmax", "scaled_masked_softmax", "scaled_aligned_causal_masked_softmax"}) {
    const bool masked = std::string(op) == "scaled_masked_softmax";
    both_dtypes(cases, std::string(op) + "_forward", [=](Case& c, int64_t rows, int dtype) {
      if (!masked) return forward(c.args<te_fl_softmax_fwd4_args>(), c, scores(c, rows), dtype);
      auto& a = c.args<te_fl_softmax_masked_args>();
      forward(a, c, scores(c, rows), dtype);
      a.mask = c.in({1, 1, c.cols(), c.cols()}, TE_FL_U8);
    });
    both_dtypes(cases, std::string(op) + "_backward", [=](Case& c, int64_t rows, int dtype) {
      backward(c.args<te_fl_softmax_bwd4_args>(), c, scores(c, rows), dtype);
    });
  }
  const std::string triangular = "scaled_upper_triang_masked_softmax_";
  both_dtypes(cases, triangular + "forward", [=](Case& c, int64_t rows, int dtype) {
    forward(c.args<te_fl_softmax_fwd3_args>(), c, square(c, rows), dtype);
  });
  both_dtypes(cases, triangular + "backward", [=](Case& c, int64_t rows, int dtype) {
    backward(c.args<te_fl_softmax_bwd3_args>(), c, square(c, rows), dtype);
  });
  describe(cases, first, "rows of all matrices, cols", {4096, 512}, {131072, 2048});
}

void ropes(Cases& cases) {
  const size_t first = cases.size();
  const auto freqs = [](Case& c, int64_t positions) -> const te_fl_tensor* {
    return c.in({positions, 1, 1, c.extent(3)}, TE_FL_F32);
  };
  const auto sbhd = [](Case& c, int64_t rows) {
    return Shape{rows, c.extent(1), c.extent(2), c.extent(3)};
  };
  for (const char* op : {"fused_rope_forward", "fused_rope_backward"}) {
    both_dtypes(cases, op, [=](Case& c, int64_t rows, int dtype) {
      auto& a = c.args<te_fl_rope_rope_args>();
      const Shape shape = sbhd(c, rows);
      a.input = c.in(shape, dtype), a.output = c.out(shape, dtype);
      a.freqs = freqs(c, shape[0]);
    });
  }
  const auto packed = [freqs](auto& a, Case& c, int64_t rows) {
    a.q_freqs = a.k_freqs = freqs(c, rows);
    a.q_dim = a.k_dim = a.v_dim = c.extent(3);
  };
  both_dtypes(cases, "fused_qkv_rope_forward", [=](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_qkv_rope_forward_args>();
    packed(a, c, rows);
    const Shape shape = sbhd(c, rows);
    a.qkv_input = c.in({rows, c.extent(1), c.extent(2), 3 * c.extent(3)}, dtype);
    a.q_out = c.out(shape, dtype), a.k_out = c.out(shape, dtype), a.v_out = c.out(shape, dtype);
  });
  both_dtypes(cases, "fused_qkv_rope_backward", [=](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fused_qkv_rope_backward_args>();
    packed(a, c, rows);
    const Shape shape = sbhd(c, rows);
    a.q_grad = c.in(shape, dtype), a.k_grad = c.in(shape, dtype), a.v_grad = c.in(shape, dtype);
    a.qkv_grad = c.out({rows, c.extent(1), c.extent(2), 3 * c.extent(3)}, dtype);
  });
  describe(cases, first, "positions, batch, heads, dim", {1024, 2, 16, 64}, {2048, 4, 32, 128});
}

void tensors(Cases& cases) {
  both_dtypes(cases, "dropout_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_dropout_fwd_args>();
    a.input = c.in({rows, c.cols()}, dtype), a.output = c.out({rows, c.cols()}, dtype);
    a.mask = c.out({(rows * c.cols() + 7) / 8}, TE_FL_U8), a.p = 0.1f;
  });
  both_dtypes(cases, "dropout_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_dropout_bwd_args>();
    a.grad_output = c.in({rows, c.cols()}, dtype), a.grad_input = c.out({rows, c.cols()}, dtype);
    a.mask = c.in({(rows * c.cols() + 7) / 8}, TE_FL_U8), a.p = 0.1f;
  });
  both_dtypes(cases, "add", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_add_args>();
    a.a = c.in({rows, c.cols()}, dtype), a.b = c.in({rows, c.cols()}, dtype);
    a.output = c.out({rows, c.cols()}, dtype);
  });
  both_dtypes(cases, "strided_copy", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_strided_copy_args>();
    BenchTensor& in = c.in({64, (rows + 63) / 64, c.cols()}, dtype);
    in.set_strides({c.cols(), 64 * c.cols(), 1});  // two leading dimensions exchanged
    a.input = in, a.output = c.out({64, (rows + 63) / 64, c.cols()}, dtype);
  });
  both_dtypes(cases, "fill", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_fill_args>();
    a.output = c.out({rows, c.cols()}, dtype), a.value = 1;
  });
  both_dtypes(cases, "embedding_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_embedding_fwd_args>();
    a.indices = c.in({rows}, TE_FL_I64), a.weight = c.in({256, c.cols()}, dtype);
    a.output = c.out({rows, c.cols()}, dtype);  // the table stays in the cache
  });
  both_dtypes(cases, "embedding_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_embedding_bwd_args>();
    a.indices = c.in({rows}, TE_FL_I64), a.grad_output = c.in({rows, c.cols()}, dtype);
    a.grad_weight = c.out({256, c.cols()}, TE_FL_F32);
  });
  both_dtypes(cases, "cross_entropy_fwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_cross_entropy_fwd_args>();
    a.logits = c.in({rows, c.cols()}, dtype), a.targets = c.in({rows}, TE_FL_I64);
    a.loss = c.out({rows}, TE_FL_F32), a.lse = c.out({rows}, TE_FL_F32);
  });
  both_dtypes(cases, "cross_entropy_bwd", [](Case& c, int64_t rows, int dtype) {
    auto& a = c.args<te_fl_cross_entropy_bwd_args>();
    a.grad_loss = c.in({rows}, TE_FL_F32), a.logits = c.in({rows, c.cols()}, dtype);
    a.targets = c.in({rows}, TE_FL_I64), a.lse = c.in({rows}, TE_FL_F32);
    a.grad_logits = c.out({rows, c.cols()}, dtype);
  });
}

// y[m, n] = x[m, k] W[n, k]^T, the forward of a linear layer.
void gemms(Cases& cases) {
  const size_t first = cases.size();
  const auto linear = [](Case& c, int64_t m, bool bf16) {
    const int64_t n = c.extent(1), k = c.extent(2);
    c.flops = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    c.product = {m, n, k, true, bf16};
  };
  both_dtypes(cases, "generic_gemm", [linear](Case& c, int64_t m, int dtype) {
    auto& a = c.args<te_fl_generic_gemm_args>();
    const int64_t n = c.extent(1), k = c.extent(2);
    a.a = c.in({m, k}, dtype), a.b = c.in({n, k}, dtype), a.d = c.out({m, n}, dtype);
    a.trans_b = 1;
    linear(c, m, dtype == TE_FL_BF16);
  });
  cases.push_back({"generic_gemm", "fp8, bf16 out", [linear](Case& c, int64_t m) {
                     auto& a = c.args<te_fl_generic_gemm_args>();
                     const int64_t n = c.extent(1), k = c.extent(2);
                     a.a = c.fp8({m, k}, TE_FL_F8E4M3), a.b = c.fp8({n, k}, TE_FL_F8E4M3);
                     a.d = c.out({m, n}, TE_FL_BF16), a.trans_b = 1;
                     linear(c, m, true);
                   }});
  for (size_t i = first; i < cases.size(); ++i) {
    cases[i].memory_bound = false, cases[i].fixed_rows = 2048;
  }
  describe(cases, first, "m, n, k", {2048, 4096, 1024}, {8192, 4096, 4096});
}

void attention(Cases& cases) {
  const size_t first = cases.size();
  const auto sbhd = [](Case& c, int64_t s) {
    return Shape{s, c.extent(1), c.extent(2), c.extent(3)};
  };
  const auto lse = [](Case& c, int64_t s) { return Shape{c.extent(1), c.extent(2), s}; };
  // Multiplications and additions of both products; a causal mask leaves half of them.
  const auto flops = [](Case& c, int64_t s) {
    return 2.0 * 2.0 * static_cast<double>(c.extent(1) * c.extent(2) * s * s * c.extent(3)) / 2;
  };
  const auto common = [=](auto& a, Case& c, int64_t s, int dtype) {
    const Shape shape = sbhd(c, s);
    a.q = c.in(shape, dtype), a.k = c.in(shape, dtype), a.v = c.in(shape, dtype);
    a.o = c.in(shape, dtype), a.softmax_lse = c.in(lse(c, s), TE_FL_F32);
    a.mask_type = TE_FL_MASK_TYPE_CAUSAL, a.scale = 0.125f;
  };
  both_dtypes(cases, "fused_attn_fwd", [=](Case& c, int64_t s, int dtype) {
    common(c.args<te_fl_fused_attn_fwd_args>(), c, s, dtype);
    c.flops = flops(c, s);
  });
  both_dtypes(cases, "fused_attn_bwd", [=](Case& c, int64_t s, int dtype) {
    auto& a = c.args<te_fl_fused_attn_bwd_args>();
    common(a, c, s, dtype);
    const Shape shape = sbhd(c, s);
    a.d_o = c.in(shape, dtype), a.dq = c.out(shape, dtype);
    a.dk = c.out(shape, dtype), a.dv = c.out(shape, dtype);
    float* sums = static_cast<float*>(a.softmax_lse->dl.data);
    for (int64_t i = 0; i < c.extent(1) * c.extent(2) * s; ++i) sums[i] = 8.0f;
    c.flops = 2.5 * flops(c, s);
  });
  cases.push_back({"get_fused_attn_backend", "bf16",
                   [=](Case& c, int64_t s) {
                     auto& a = c.args<te_fl_get_fused_attn_backend_args>();
                     const Shape shape = sbhd(c, s);
                     a.q = c.in(shape, TE_FL_BF16), a.k = c.in(shape, TE_FL_BF16);
                     a.v = c.in(shape, TE_FL_BF16), a.backend = c.out({1}, TE_FL_I32);
                   },
                   false, 16});
  for (CaseSpec& spec : cases) {
    if (spec.op == "fused_attn_fwd" || spec.op == "fused_attn_bwd") {
      spec.memory_bound = false, spec.fixed_rows = 1024;
    }
  }
  describe(cases, first, "sequence, batch, heads, dim", {1024, 2, 8, 64}, {2048, 4, 32, 128});
}

}  // namespace

const std::vector<CaseSpec>& all_cases() {
  static const Cases table = [] {
    Cases cases;
    for (const auto family : {gemms, attention, activations, norms, quantisation, optimizers,
                              softmaxes, ropes, tensors}) {
      family(cases);
    }
    return cases;
  }();
  return table;
}

}  // namespace te_fl::bench
