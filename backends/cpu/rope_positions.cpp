#include "rope_positions.hpp"

#include "te_fl/backend/values_in_memory.hpp"

namespace te_fl::cpu {

using backend::invalid;

namespace {

// Access to start_positions[b], which is 0 if the call has no such tensor.
class Starts {
 public:
  Starts(const te_fl_tensor* t, int64_t batch) : t_(t) {
    if (t == nullptr) return;
    for (int64_t b = 0; b < batch; ++b) {
      if ((*this)[b] >= 0) continue;
      invalid("start_positions[" + std::to_string(b) + "] is " + std::to_string((*this)[b]) +
              ", expected 0 or more");
    }
  }
  int64_t operator[](int64_t b) const {
    return t_ == nullptr ? 0 : backend::data<const int32_t>(*t_)[b * backend::stride(*t_, 0)];
  }

 private:
  const te_fl_tensor* t_;
};

}  // namespace

Positions dense_positions(int64_t extent0, int64_t extent1, int32_t layout,
                          const te_fl_tensor* start_positions, const ContextParallel& cp) {
  const bool sbhd = layout == TE_FL_LAYOUT_SBHD;
  const int64_t seqlen = sbhd ? extent0 : extent1;
  const Starts starts(start_positions, sbhd ? extent1 : extent0);
  Positions p;
  p.of_token.resize(static_cast<size_t>(extent0 * extent1));
  int64_t token = 0;
  for (int64_t x = 0; x < extent0; ++x) {
    for (int64_t y = 0; y < extent1; ++y, ++token) {
      p.set(token, starts[sbhd ? y : x] + cp.position(sbhd ? x : y, seqlen));
    }
  }
  return p;
}

Positions packed_positions(int64_t tokens, const te_fl_tensor& cu,
                           const te_fl_tensor* start_positions, const ContextParallel& cp) {
  const int64_t batch = cu.dl.shape[0] - 1;
  const Starts starts(start_positions, batch);
  const auto prefix = [&](int64_t b) -> int64_t {
    return backend::data<const int32_t>(cu)[b * backend::stride(cu, 0)];
  };
  Positions p;
  p.of_token.assign(static_cast<size_t>(tokens), -1);
  for (int64_t b = 0; b < batch; ++b) {
    const std::string name = "sequence " + std::to_string(b) + " of cu_seqlens";
    const std::string spans = name + " spans tokens " + std::to_string(prefix(b)) + " to " +
                              std::to_string(prefix(b + 1)) + ", expected ";
    if (prefix(b) < 0 || prefix(b + 1) < prefix(b) || prefix(b + 1) > tokens * cp.size) {
      invalid(spans + "non-decreasing values from 0 to " + std::to_string(tokens * cp.size) +
              " (the input's tokens times cp_size)");
    }
    if (prefix(b) % cp.size != 0 || prefix(b + 1) % cp.size != 0) {
      invalid(spans + "multiples of cp_size, " + std::to_string(cp.size));
    }
    const int64_t begin = prefix(b) / cp.size;
    const int64_t length = prefix(b + 1) / cp.size - begin;
    backend::check_chunks(length, cp.size, name);
    for (int64_t s = 0; s < length; ++s) p.set(begin + s, starts[b] + cp.position(s, length));
  }
  return p;
}

void check_freqs(const char* name, const te_fl_tensor& freqs, const Positions& positions) {
  backend::check_angle_rows(name, freqs.dl.shape[0], positions.largest);
}

}  // namespace te_fl::cpu
