#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "conformance/case.hpp"

namespace te_fl::conformance {

class Prepared;
struct Result;

// The margins of a tensor in device memory: the bytes before and after it, which no op may access.
// Device pages cannot be protected. An op that reads the margins is detected because its results
// change with their contents; an op that writes them is detected because the bytes change. A read
// whose value is not used is not detected.
struct Margins {
  // A large finite number in all float formats: it changes a sum, product or maximum.
  static constexpr uint8_t kLarge = 0x7b;
  // NaN in all float formats that have one, so it also propagates through a factor of zero; -1 as
  // an integer.
  static constexpr uint8_t kNan = 0xff;
  // The bytes used in an ordinary run.
  static constexpr uint8_t kPlain = 0xc5;

  size_t bytes = size_t{64} << 10;  // on each side, a multiple of 256
  uint8_t fill = kLarge;
  // The margin of the tensor or array with this name (empty: none) differs on one side: the
  // odd_bytes next to it have the value odd_fill.
  std::string odd_name;
  bool odd_before = false;
  size_t odd_bytes = 0;
  uint8_t odd_fill = kNan;

  // Records the name of a tensor that was placed between margins. Called by the threads of a case's
  // ranks.
  void add_placed(const std::string& name);
  // Returns the recorded names and clears the list.
  std::vector<std::string> take_placed();

  // The buffer's contents between its margins.
  std::vector<uint8_t> around(const Buffer& buffer, const std::string& name) const;
  // Describes the first margin byte that differs from those of around(): "byte 4 behind the end of
  // its 68 bytes"; empty if none does.
  std::string written_outside(const Buffer& buffer, const std::vector<uint8_t>& made,
                              const std::vector<uint8_t>& now) const;

 private:
  std::vector<std::string> placed_;
};

// Runs a case on a device with two different sets of margins. It passes if both results are correct
// and, with `deterministic`, have the same bits. Otherwise the message names the byte and the
// tensor outside of which it was read or written.
Result run_between_margins(Prepared& prepared, const std::string& impl_id, bool deterministic,
                           size_t bytes = Margins().bytes);

}  // namespace te_fl::conformance
