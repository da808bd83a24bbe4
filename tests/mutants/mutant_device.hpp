#pragma once

// A device of which one function is wrong above a size:
//   device FUNCTION above N [on a stream]      FUNCTION: copy to_device, copy to_host, copy within,
//                                              fill
// A call of more than N bytes loses the last byte. "on a stream" limits the error to streams other
// than the default one. "device: none" has no error.

#include <sstream>
#include <stdexcept>
#include <string>

#include "support/far_device.hpp"

namespace te_fl::mutants {

class MutantDevice : public testing::FarDevice {
 public:
  explicit MutantDevice(const std::string& text) : FarDevice(0, size_t{1} << 28), own_(api) {
    desc.provider = "mutant";
    if (text != "device: none") parse(text);
    api.copy = [](void* self, void* to, const void* from, size_t bytes, uint32_t host, void* stream,
                  const te_fl_error_sink* e) {
      const MutantDevice& d = of(self);
      const char* const way = host == 2 ? "to_device" : host == 1 ? "to_host" : "within";
      return d.own_.copy(self, to, from, d.lessened(way, bytes, stream), host, stream, e);
    };
    api.fill = [](void* self, void* to, uint8_t value, size_t bytes, void* stream,
                  const te_fl_error_sink* e) {
      const MutantDevice& d = of(self);
      return d.own_.fill(self, to, value, d.lessened("fill", bytes, stream), stream, e);
    };
  }

 private:
  static const MutantDevice& of(void* self) {
    return static_cast<const MutantDevice&>(*static_cast<FarDevice*>(self));
  }
  void parse(const std::string& text) {
    std::istringstream in(text);
    std::string word;
    in >> word >> function_;
    if (function_ == "copy") in >> function_;
    if (!(in >> word >> above_) || word != "above")
      throw std::invalid_argument("\"" + text +
                                  "\" is no error of a device; see mutant_device.hpp");
    on_streams_ = static_cast<bool>(in >> word);
  }
  size_t lessened(const std::string& function, size_t bytes, const void* stream) const {
    const bool wrong =
        function == function_ && bytes > above_ && (!on_streams_ || stream != nullptr);
    return wrong ? bytes - 1 : bytes;
  }

  te_fl_device_api own_;  // the functions of the far device
  std::string function_;
  size_t above_ = 0;
  bool on_streams_ = false;
};

}  // namespace te_fl::mutants
