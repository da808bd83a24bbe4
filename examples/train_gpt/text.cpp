#include "text.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

namespace train_gpt {

using te_fl::Result;
using te_fl::Tensor;

uint64_t mix(uint64_t seed, uint64_t counter) {
  uint64_t z = seed * 0x9e3779b97f4a7c15u + counter * 0xd1b54a32d192ed03u + 0x2545f4914f6cdd1du;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

Result<Text> Text::load(const std::string& path, int64_t seq_len) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return te_fl::not_found(
        "cannot read the text " + path + ": " + std::strerror(errno) +
        "; give one with --data FILE, or fetch the default with tools/fetch_text.sh");
  }
  std::ostringstream content;
  content << file.rdbuf();
  Text text;
  text.bytes_ = std::move(content).str();
  text.seq_len_ = seq_len;
  text.split_ = text.bytes_.size() - text.bytes_.size() / 10;
  const size_t least = static_cast<size_t>(seq_len) + 1;
  if (text.held_out_bytes() < least) {
    return te_fl::invalid_argument(
        "the text " + path + " has " + std::to_string(text.bytes_.size()) +
        " bytes, of which the last tenth is held out; one context needs --seq-len + 1 = " +
        std::to_string(least) + " held-out bytes, so the text needs at least " +
        std::to_string(10 * least) + ": give a longer text or a smaller --seq-len");
  }
  return text;
}

Result<Batch> Text::gather(const std::vector<size_t>& starts, te_fl::Device device) const {
  const int64_t batch = static_cast<int64_t>(starts.size());
  TE_FL_ASSIGN_OR_RETURN(Tensor inputs, Tensor::empty({batch, seq_len_}, te_fl::DType::kI32));
  TE_FL_ASSIGN_OR_RETURN(Tensor targets, Tensor::empty({batch, seq_len_}, te_fl::DType::kI32));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t s = 0; s < seq_len_; ++s) {
      const auto* at = reinterpret_cast<const unsigned char*>(bytes_.data()) +
                       starts[static_cast<size_t>(b)] + s;
      inputs.data<int32_t>()[b * seq_len_ + s] = at[0];
      targets.data<int32_t>()[b * seq_len_ + s] = at[1];
    }
  }
  if (device.is_host()) return Batch{std::move(inputs), std::move(targets)};
  TE_FL_ASSIGN_OR_RETURN(Tensor device_inputs, inputs.to(device));
  TE_FL_ASSIGN_OR_RETURN(Tensor device_targets, targets.to(device));
  return Batch{std::move(device_inputs), std::move(device_targets)};
}

Result<Batch> Text::training(uint64_t seed, int64_t step, int64_t batch, te_fl::Device device,
                             Part part) const {
  std::vector<size_t> starts;
  const size_t windows = split_ - static_cast<size_t>(seq_len_);
  const int64_t own = batch / part.count;
  for (int64_t b = part.index * own; b < (part.index + 1) * own; ++b) {
    starts.push_back(mix(seed, static_cast<uint64_t>(step * batch + b)) % windows);
  }
  return gather(starts, device);
}

Result<Batch> Text::held_out(int64_t index, int64_t count, int64_t batch, te_fl::Device device,
                             Part part) const {
  std::vector<size_t> starts;
  const size_t last = held_out_bytes() - static_cast<size_t>(seq_len_) - 1;
  const size_t total = static_cast<size_t>(count * batch);
  const int64_t own = batch / part.count;
  for (int64_t b = part.index * own; b < (part.index + 1) * own; ++b) {
    const size_t i = static_cast<size_t>(index * batch + b);
    starts.push_back(split_ + (total > 1 ? last * i / (total - 1) : 0));
  }
  return gather(starts, device);
}

}  // namespace train_gpt
