#pragma once

// The elements of a tensor in host memory, by their logical index, as bits and as values.

#include <cstring>
#include <type_traits>
#include <vector>

#include "dispatch.hpp"
#include "te_fl/backend.hpp"
#include "te_fl/dtype.hpp"

namespace te_fl::mutants {

class View {
 public:
  View() = default;
  explicit View(const te_fl_tensor& t)
      : data_(backend::data<uint8_t>(t)),
        dtype_(dtype_index(t.dl.dtype)),
        bits_(t.dl.dtype.bits),
        matrix_(backend::as_matrix(t)),
        elements_(backend::numel(t)) {
    if (!backend::is_contiguous(t))
      for (int i = 0; i < t.dl.ndim; ++i) extents_.push_back({t.dl.shape[i], t.dl.strides[i]});
  }
  // Compact elements of a quantised tensor's part.
  View(void* data, int dtype, int bits, int64_t elements)
      : data_(static_cast<uint8_t*>(data)), dtype_(dtype), bits_(bits), elements_(elements) {
    matrix_ = {1, elements};
  }

  bool has_data() const { return data_ != nullptr; }
  int64_t elements() const { return elements_; }
  int64_t rows() const { return matrix_.rows; }
  int64_t columns() const { return matrix_.cols; }
  bool is_float() const { return dtype_ <= TE_FL_F8E8M0; }

  uint64_t bits(int64_t i) const {
    const int64_t at = index(i);
    if (bits_ == 4) return data_[at / 2] >> at % 2 * 4 & 0xf;
    uint64_t value = 0;
    std::memcpy(&value, data_ + at * (bits_ / 8), static_cast<size_t>(bits_ / 8));
    return value;
  }
  void set_bits(int64_t i, uint64_t value) {
    const int64_t at = index(i);
    if (bits_ == 4) {
      const int shift = static_cast<int>(at % 2 * 4);
      data_[at / 2] = static_cast<uint8_t>((data_[at / 2] & ~(0xf << shift)) | value << shift);
    } else {
      std::memcpy(data_ + at * (bits_ / 8), &value, static_cast<size_t>(bits_ / 8));
    }
  }
  double value(int64_t i) const {
    if (is_float())
      return reference::visit_float(dtype_, [&](auto t) {
        using T = typename decltype(t)::type;
        const T element = reference::load<T>(data_, index(i));
        if constexpr (std::is_same_v<T, double>)
          return element;
        else
          return static_cast<double>(static_cast<float>(element));
      });
    const auto raw = static_cast<int64_t>(bits(i) << (64 - bits_));
    return static_cast<double>(raw >> (64 - bits_));
  }
  void set_value(int64_t i, double value) {
    if (!is_float()) return set_bits(i, static_cast<uint64_t>(static_cast<int64_t>(value)));
    reference::visit_float(dtype_, [&](auto t) {
      using T = typename decltype(t)::type;
      if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>)
        reference::save<T>(data_, index(i), static_cast<T>(value));
      else
        reference::save<T>(data_, index(i), T(value));
    });
  }
  // The bits of the magnitude without the sign. The format's order of values is that of these.
  uint64_t sign_bit() const { return uint64_t{1} << (bits_ - 1); }
  int dtype() const { return dtype_; }
  std::vector<uint64_t> all_bits() const {
    std::vector<uint64_t> all(static_cast<size_t>(elements_));
    for (int64_t i = 0; i < elements_; ++i) all[static_cast<size_t>(i)] = bits(i);
    return all;
  }

 private:
  struct Extent {
    int64_t size, stride;
  };
  int64_t index(int64_t i) const {
    if (extents_.empty()) return i;
    int64_t at = 0;
    for (size_t d = extents_.size(); d-- > 0; i /= extents_[d].size)
      at += i % extents_[d].size * extents_[d].stride;
    return at;
  }

  uint8_t* data_ = nullptr;
  int dtype_ = 0, bits_ = 8;
  backend::Matrix matrix_;
  int64_t elements_ = 0;
  std::vector<Extent> extents_;  // empty: compact
};

}  // namespace te_fl::mutants
