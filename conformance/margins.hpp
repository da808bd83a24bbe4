#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "conformance/case.hpp"

namespace te_fl::conformance {

class Prepared;
struct Result;

// The bytes before and behind each tensor in a device's memory, which no op may read or write. A
// device's pages cannot be protected, so an op that reads there shows by results that change with
// these bytes, and one that writes there by the bytes. A value that is read and not used cannot be
// seen.
struct Margins {
  // A large finite number in every float format: a sum, product or maximum takes it in.
  static constexpr uint8_t kLarge = 0x7b;
  // NaN in every float format that has one, also under a factor of zero; -1 as an integer.
  static constexpr uint8_t kNan = 0xff;
  // The bytes that lie there in a plain run.
  static constexpr uint8_t kPlain = 0xc5;

  size_t bytes = size_t{64} << 10;  // on either side, a multiple of 256
  uint8_t fill = kLarge;
  // On one side of the tensor, or part of one, that has this name (empty: of none), the bytes
  // nearest to it are others.
  std::string odd_name;
  bool odd_before = false;
  size_t odd_bytes = 0;
  uint8_t odd_fill = kNan;

  // Adds the name of a tensor that a run put between margins; from the threads of a case's ranks.
  void add_placed(const std::string& name);
  // Those names; none of them are left.
  std::vector<std::string> take_placed();

  // The buffer's contents between its margins.
  std::vector<uint8_t> around(const Buffer& buffer, const std::string& name) const;
  // Empty, or which byte outside is not as around() made it: "byte 4 behind the end of its 68
  // bytes".
  std::string written_outside(const Buffer& buffer, const std::vector<uint8_t>& made,
                              const std::vector<uint8_t>& now) const;

 private:
  std::vector<std::string> placed_;
};

// Runs a case on a device with one set of margins and with another. It passes if both results are
// right and, with `deterministic`, the same bits. Else the message says which byte outside of which
// tensor was read or written.
Result run_between_margins(Prepared& prepared, const std::string& impl_id, bool deterministic,
                           size_t bytes = Margins().bytes);

}  // namespace te_fl::conformance
