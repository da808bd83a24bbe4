#pragma once

#include <memory>
#include <optional>

#include "te_fl/nn/modules/linear.hpp"
#include "te_fl/nn/modules/module.hpp"
#include "te_fl/ops/enums.h"

namespace te_fl::nn {

namespace detail {
struct Fp8Mode;
}

// Order of the dimensions: sbhd [sequence, batch, ...], bshd [batch, sequence, ...], thd [tokens,
// ...] (sequences one after another, told apart by cu_seqlens).
enum class Layout : uint8_t {
  kSBHD = TE_FL_LAYOUT_SBHD,
  kBSHD = TE_FL_LAYOUT_BSHD,
  kTHD = TE_FL_LAYOUT_THD,
};

enum class MaskType : uint8_t {
  kNone = TE_FL_MASK_TYPE_NONE,
  kCausal = TE_FL_MASK_TYPE_CAUSAL,
  kCausalBottomRight = TE_FL_MASK_TYPE_CAUSAL_BOTTOM_RIGHT,
  kPadding = TE_FL_MASK_TYPE_PADDING,
  kPaddingCausal = TE_FL_MASK_TYPE_PADDING_CAUSAL,
  kPaddingCausalBottomRight = TE_FL_MASK_TYPE_PADDING_CAUSAL_BOTTOM_RIGHT,
  kArbitrary = TE_FL_MASK_TYPE_ARBITRARY,
};

enum class SoftmaxType : uint8_t {
  kVanilla = TE_FL_SOFTMAX_TYPE_VANILLA,
  kOffByOne = TE_FL_SOFTMAX_TYPE_OFF_BY_ONE,
  kLearnable = TE_FL_SOFTMAX_TYPE_LEARNABLE,
};

// Per-call inputs of attention. Undefined tensors are absent. Shared storage is kept until the
// backward.
struct AttentionInputs {
  Tensor attn_mask = {};  // U8 or bool [1|B, 1|H, 1|Sq, 1|Sk], not 0 = masked out; with kArbitrary
  Tensor bias = {};       // [1|B, 1|H, Sq, Sk], added to the scaled scores
  Tensor alibi_slopes = {};   // F32 [H] or [B, H]
  Tensor cu_seqlens_q = {};   // I32 [B+1]; with thd and the padding masks
  Tensor cu_seqlens_kv = {};  // I32 [B+1]; self-attention takes cu_seqlens_q if this is undefined
  Tensor cu_seqlens_q_padded = {};  // I32 [B+1], thd with gaps between sequences
  Tensor cu_seqlens_kv_padded = {};
  int64_t max_seqlen_q =
      0;  // thd: at least the longest sequence; needed with dropout, else 0 lets the op look
  int64_t max_seqlen_kv = 0;
  // Used by MultiheadAttention and TransformerLayer:
  Tensor rotary_angles = {};  // F32 [>= S, 1, 1, R], see init::rotary_angles; undefined: no RoPE
  Tensor rotary_start_positions = {};  // I32 [B], position of each sequence's first token
  Tensor rotary_angles_kv = {};        // of the keys, if not rotary_angles
  // [Skv, B, hidden], [B, Skv, hidden] or [Tkv, hidden]: what cross-attention takes keys and values
  // from.
  Tensor encoder_output = {};
  // In place of the module's options, for this call and its backward.
  std::optional<MaskType> mask_type = {};
  std::optional<int64_t> window_left = {};
  std::optional<int64_t> window_right = {};
  // With the padding mask types, instead of cu_seqlens: U8 or bool [B, 1, 1, S] or [B, S], not 0 =
  // padding, wherever it lies; that of the queries alone counts for the keys too. See
  // resolve_padding_masks().
  Tensor padding_mask_q = {};
  Tensor padding_mask_kv = {};
  std::optional<float> softcap = {};  // in place of the module's, as mask_type is
};

// `inputs` without padding masks, which become what the attention ops take: cu_seqlens where all
// padding is at the ends of the sequences, else mask_type kArbitrary with an attn_mask that takes
// in the causal bound and the window of `inputs`, if it has one (a module's own window then counts
// as with any arbitrary mask). `mask_type` is the module's, if `inputs` has none of its own. Reads
// the masks on the host, so it waits for the device, and is FAILED_PRECONDITION in a capture. A
// forward does it by itself; call it once where several layers share the masks.
TE_FL_API Result<AttentionInputs> resolve_padding_masks(const AttentionInputs& inputs,
                                                        MaskType mask_type);

struct DotProductAttentionOptions {
  int64_t num_attention_heads = 0;
  int64_t head_dim = 0;
  int64_t num_gqa_groups = 0;  // heads of K and V; 0: num_attention_heads
  Layout layout = Layout::kSBHD;
  MaskType mask_type = MaskType::kCausal;
  // Sliding window; -1: no bound. It counts from the mask type's diagonal: top left with kCausal
  // and kPaddingCausal, else bottom right, where the last query is level with the last key.
  int64_t window_left = -1;
  int64_t window_right = -1;
  SoftmaxType softmax_type = SoftmaxType::kVanilla;
  float softmax_scale = 0;  // 0: 1/sqrt(head_dim)
  float attention_dropout = 0;
  DType activation_dtype = DType::kF32;
  Device device = {};
  int64_t value_head_dim = 0;  // head size Dv of v and o; 0: head_dim
  float softcap = 0;           // scaled products x become softcap * tanh(x / softcap); 0: they stay
};

// o = softmax(cap(scale q k^T) + bias, masked) v. q [.., H, D], k [.., G, D], v [.., G, Dv] in the
// layout
// -> o [.., H, Dv]. Strided views of packed QKV are accepted. Parameter (kLearnable only):
// softmax_offset [H], F32. FP8 site (recipe with fp8_dpa): fp8, forward slots qkv, s, o, backward
// slots do, dp, dqkv.
class TE_FL_API DotProductAttention : public Module {
 public:
  struct Gradients {
    Tensor dq, dk, dv;  // of q, k, v; compact unless the caller gave them
    Tensor dbias;       // of AttentionInputs::bias if it was given
  };
  static Result<std::unique_ptr<DotProductAttention>> create(
      const DotProductAttentionOptions& options);
  ~DotProductAttention() override;
  // ctx null: inference, no dropout.
  Result<Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, Ctx* ctx,
                         const AttentionInputs& inputs = {});
  // Each gradient has its input's dtype. `into`: where to write dq, dk and dv instead of new
  // tensors; strided views of q's, k's and v's shape, in any high-precision dtype. FP8 attention
  // also writes to quantised views and takes a quantised d_o.
  Result<Gradients> backward(const Tensor& d_o, Ctx& ctx, const Gradients* into = nullptr);

 private:
  friend class MultiheadAttention;
  // What MultiheadAttention needs to keep q, k, v, o and their gradients in codes between FP8
  // attention and the products around it: how a forward is to compute (mode.fp8: in FP8); new
  // codes, of which q, k and v, or their gradients, are slices; and forward() whose q, k and v may
  // be codes and whose o is, with room for a column-wise copy if `columns`.
  enum class Codes : uint8_t { kQkv, kOutputGrad, kQkvGrad };
  Result<detail::Fp8Mode> begin(bool training);
  Result<Tensor> codes(const detail::Fp8Mode& mode, Codes what, std::span<const int64_t> shape);
  Result<Tensor> forward_codes(const Tensor& q, const Tensor& k, const Tensor& v, Ctx* ctx,
                               const AttentionInputs& inputs, bool columns);
  struct Impl;
  explicit DotProductAttention(const DotProductAttentionOptions& options);
  std::unique_ptr<Impl> impl_;
};

// Whether keys and values come from x too or from AttentionInputs::encoder_output.
enum class AttentionType : uint8_t { kSelf, kCross };

// Of each head of q and k, over its elements: x / sqrt(sum x^2 + eps), or a norm with parameters.
enum class QkNorm : uint8_t { kNone, kL2, kRMSNorm, kLayerNorm };

struct MultiheadAttentionOptions {
  int64_t hidden_size = 0;
  int64_t num_attention_heads = 0;
  int64_t num_gqa_groups = 0;  // 0: num_attention_heads
  int64_t kv_channels = 0;     // head size; 0: hidden_size / num_attention_heads
  bool input_layernorm =
      true;  // normalise first (submodule layernorm_qkv); otherwise a plain Linear (qkv)
  Normalization normalization = Normalization::kLayerNorm;
  float epsilon = 1e-5f;
  bool zero_centered_gamma = false;
  bool bias = true;
  Layout layout = Layout::kSBHD;
  MaskType mask_type = MaskType::kCausal;
  int64_t window_left = -1;
  int64_t window_right = -1;
  SoftmaxType softmax_type = SoftmaxType::kVanilla;
  float softmax_scale = 0;  // 0: 1/sqrt(head size)
  float attention_dropout = 0;
  bool rotary_interleaved = false;
  DType param_dtype = DType::kF32;
  DType activation_dtype = DType::kF32;
  Device device = {};
  uint64_t seed = 0;
  float init_std = 0.023f;
  float output_init_std = 0.023f;  // proj
  AttentionType attention_type = AttentionType::kSelf;
  // False: the rows of queries, keys and values are parameters of their own (query_weight,
  // key_weight, value_weight, query_bias, ...), and not interleaved.
  bool fuse_qkv_params = true;
  bool qkv_weight_interleaved = true;  // where they are fused
  std::optional<bool> qkv_bias = {};   // in place of `bias`
  std::optional<bool> proj_bias = {};
  bool return_bias = false;  // of proj, as in Linear
  QkNorm qk_norm = QkNorm::kNone;
  float qk_norm_epsilon = 1e-6f;
  bool qk_norm_before_rope = false;
  // The key heads (groups) [groups_begin, groups_begin + num_gqa_groups), with their query heads,
  // of an attention of groups_whole (0: this is whole), whose initial weights this one has there.
  int64_t groups_whole = 0;
  int64_t groups_begin = 0;
  float softcap = 0;  // as in DotProductAttentionOptions
};

// y = proj(attention(split(norm(x) Wqkv^T + b))). x [S, B, hidden], [B, S, hidden] or [T, hidden]
// by layout -> same shape. Submodules: q_norm and k_norm (kRMSNorm, kLayerNorm), layernorm_qkv (or
// qkv), core_attention, proj. The rows of the QKV weight [(H + 2G) D, hidden] are interleaved by
// group: for each of the G groups its H/G query heads, its key head, its value head, D rows each;
// or, not interleaved, all query heads, all key heads, all value heads. Cross-attention has
// layernorm_query (or query_layer) [H D, hidden] for x and key_value [2 G D, hidden] for the
// encoder output in their place; interleaved: for each group its key head and its value head.
class TE_FL_API MultiheadAttention : public Module {
 public:
  static Result<std::unique_ptr<MultiheadAttention>> create(
      const MultiheadAttentionOptions& options);
  ~MultiheadAttention() override;
  // residual (x's shape): added to the output; its gradient is dy itself. layernorm_output and its
  // gradient are as in LayerNormLinear; they need input_layernorm.
  Result<Tensor> forward(const Tensor& x, Ctx* ctx, const AttentionInputs& inputs = {},
                         const ForwardOptions& options = {}, const Tensor* residual = nullptr,
                         Tensor* layernorm_output = nullptr);
  // residual_grad: added to dx. dbias: receives the gradient of inputs.bias if not null.
  // encoder_grad: receives that of inputs.encoder_output if not null.
  Result<Tensor> backward(const Tensor& dy, Ctx& ctx, const Tensor* residual_grad = nullptr,
                          Tensor* dbias = nullptr, const Tensor* layernorm_output_grad = nullptr,
                          Tensor* encoder_grad = nullptr);

 private:
  struct Impl;
  explicit MultiheadAttention(const MultiheadAttentionOptions& options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace te_fl::nn
