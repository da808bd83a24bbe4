#include "nn/modules/attention_inputs.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "nn/base/capture.hpp"
#include "nn/base/tensor_ops.hpp"
#include "te_fl/tensor.hpp"

namespace te_fl::nn {
namespace detail {

Status check_window(std::string_view module, int64_t left, int64_t right) {
  if (left >= -1 && right >= -1) return {};
  return invalid_argument(std::string(module) + ": the window is (" + std::to_string(left) + ", " +
                          std::to_string(right) +
                          "); each bound must be at least 0, or -1 for none");
}

Result<Tensor> expand_mask(const Tensor& mask, int64_t length_q, int64_t length_kv) {
  if (!mask.defined() || mask.rank() != 4) return mask;
  Shape shape(mask.shape().begin(), mask.shape().end());
  Shape strides(mask.strides().begin(), mask.strides().end());
  const int64_t want[] = {length_q, length_kv};
  bool expanded = false;
  for (size_t i = 0; i < 2; ++i) {
    if (shape[2 + i] != 1 || want[i] == 1) continue;
    shape[2 + i] = want[i];
    strides[2 + i] = 0;
    expanded = true;
  }
  if (!expanded) return mask;
  TE_FL_ASSIGN_OR_RETURN(const Tensor wide, Tensor::wrap(mask.raw_data(), shape, strides,
                                                         mask.dtype(), mask.device(), nullptr));
  return compact(wide);
}

}  // namespace detail

namespace {

// The padding mask for queries or for keys, in host memory: batch x length, true = padding.
struct Padding {
  int64_t batch = 0, length = 0;
  std::vector<uint8_t> padded;

  bool at(int64_t b, int64_t i) const { return padded[static_cast<size_t>(b * length + i)] != 0; }
  // The number of tokens of a sequence that are not padding.
  int64_t count(int64_t b) const {
    const auto row = padded.begin() + b * length;
    return std::count(row, row + length, 0);
  }
  // The length of a sequence without its trailing padding; -1 if there is padding elsewhere.
  int64_t trailing_length(int64_t b) const {
    int64_t count = 0;
    while (count < length && !at(b, count)) ++count;
    for (int64_t i = count; i < length; ++i) {
      if (!at(b, i)) return -1;
    }
    return count;
  }
  bool all_trailing() const {
    for (int64_t b = 0; b < batch; ++b) {
      if (trailing_length(b) < 0) return false;
    }
    return true;
  }
};

Result<Padding> read_mask(const char* name, const Tensor& mask) {
  const int rank = mask.rank();
  const bool fits = (mask.dtype() == DType::kU8 || mask.dtype() == DType::kBool) &&
                    (rank == 2 || (rank == 4 && mask.size(1) == 1 && mask.size(2) == 1));
  if (!fits) {
    return invalid_argument(std::string("attention: ") + name + " is " + mask.describe() +
                            "; it must be u8 or bool of shape [batch, 1, 1, sequence] or [batch, "
                            "sequence], not 0 = padding");
  }
  TE_FL_ASSIGN_OR_RETURN(const bool captured, detail::capturing(mask.device()));
  if (captured) {
    return failed_precondition(
        std::string("attention: ") + name +
        " is read on the host, and a graph is being captured; call resolve_padding_masks() before "
        "the capture, or give cu_seqlens");
  }
  TE_FL_ASSIGN_OR_RETURN(const Tensor host, mask.to(Device()));
  Padding padding;
  padding.batch = host.size(0);
  padding.length = host.size(-1);
  padding.padded.assign(host.data<uint8_t>(), host.data<uint8_t>() + host.numel());
  return padding;
}

// Cumulative sequence lengths, I32 [batch + 1]. Requires that all padding is trailing.
Result<Tensor> prefix_sums(const Padding& padding, const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor sums, Tensor::empty({padding.batch + 1}, DType::kI32));
  int32_t* out = sums.data<int32_t>();
  out[0] = 0;
  for (int64_t b = 0; b < padding.batch; ++b) {
    out[b + 1] = out[b] + static_cast<int32_t>(padding.trailing_length(b));
  }
  return sums.to(device);
}

// The range of keys that a query attends to, as distances from the query's position; -1: unbounded.
// The position is the query's index; with bottom_right it is the index plus the number of keys
// minus the number of queries.
struct Band {
  int64_t left = -1, right = -1;
  bool bottom_right = false;
};

// Makes a mask U8 [batch, 1, Sq, Skv]: 1 if the query or the key is padding, or the key is outside
// of the band.
Result<Tensor> pair_mask(const Padding& q, const Padding& kv, const Band& band,
                         const Device& device) {
  TE_FL_ASSIGN_OR_RETURN(const Tensor mask,
                         Tensor::empty({q.batch, 1, q.length, kv.length}, DType::kU8));
  uint8_t* out = mask.data<uint8_t>();
  for (int64_t b = 0; b < q.batch; ++b) {
    const int64_t shift = band.bottom_right ? kv.count(b) - q.count(b) : 0;
    for (int64_t i = 0; i < q.length; ++i) {
      for (int64_t j = 0; j < kv.length; ++j) {
        const int64_t distance = j - (i + shift);
        const bool outside =
            (band.left >= 0 && distance < -band.left) || (band.right >= 0 && distance > band.right);
        *out++ = outside || q.at(b, i) || kv.at(b, j) ? 1 : 0;
      }
    }
  }
  return mask.to(device);
}

}  // namespace

Result<AttentionInputs> resolve_padding_masks(const AttentionInputs& inputs, MaskType mask_type) {
  const Tensor &of_q = inputs.padding_mask_q, &of_kv = inputs.padding_mask_kv;
  if (!of_q.defined() && !of_kv.defined()) return inputs;
  const MaskType type = inputs.mask_type.value_or(mask_type);
  const bool bottom_right = type == MaskType::kPaddingCausalBottomRight;
  if (type != MaskType::kPadding && type != MaskType::kPaddingCausal && !bottom_right) {
    return invalid_argument(
        "attention: a padding mask is given and the mask type is none of the padding ones; set "
        "mask_type to kPadding, kPaddingCausal or kPaddingCausalBottomRight, or leave the mask "
        "out");
  }
  if (inputs.cu_seqlens_q.defined() || inputs.cu_seqlens_kv.defined()) {
    return invalid_argument(
        "attention: padding masks and cu_seqlens are both given, and say the same thing; give one "
        "of them");
  }
  if (!of_q.defined()) {
    return invalid_argument(
        "attention: padding_mask_kv is given without padding_mask_q, and how many queries there "
        "are "
        "is not known; give both (zeros where no query is padding)");
  }
  const Device device = of_q.device();
  TE_FL_ASSIGN_OR_RETURN(const Padding q, read_mask("padding_mask_q", of_q));
  Padding kv = q;
  if (of_kv.defined()) {
    TE_FL_ASSIGN_OR_RETURN(kv, read_mask("padding_mask_kv", of_kv));
  }
  AttentionInputs result = inputs;
  result.padding_mask_q = result.padding_mask_kv = Tensor();
  result.mask_type = type;
  if (q.batch != kv.batch) {
    return invalid_argument("attention: padding_mask_q has " + std::to_string(q.batch) +
                            " sequences and padding_mask_kv " + std::to_string(kv.batch) +
                            "; they must have as many");
  }
  if (q.all_trailing() && kv.all_trailing()) {
    TE_FL_ASSIGN_OR_RETURN(result.cu_seqlens_q, prefix_sums(q, device));
    TE_FL_ASSIGN_OR_RETURN(result.cu_seqlens_kv, prefix_sums(kv, device));
    return result;
  }
  if (bottom_right) {
    return invalid_argument(
        "attention: padding that is not at the ends of the sequences does not go with "
        "kPaddingCausalBottomRight, whose diagonal depends on the lengths; give an attn_mask with "
        "kArbitrary instead");
  }
  // The mask that is made here includes the causal bound and the window, because the op would apply
  // the window of an arbitrary mask to the padded extents instead of the sequences' lengths.
  const bool causal = type == MaskType::kPaddingCausal;
  const Band band{.left = inputs.window_left.value_or(-1),
                  .right = causal ? 0 : inputs.window_right.value_or(-1),
                  .bottom_right = !causal};
  TE_FL_ASSIGN_OR_RETURN(result.attn_mask, pair_mask(q, kv, band, device));
  result.mask_type = MaskType::kArbitrary;
  if (inputs.window_left) result.window_left = -1;
  if (inputs.window_right) result.window_right = -1;
  return result;
}

}  // namespace te_fl::nn
