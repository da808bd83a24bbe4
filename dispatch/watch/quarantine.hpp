#pragma once

#include <string>

#include "te_fl/device.hpp"
#include "te_fl/watch.hpp"

// The quarantine: implementations that produced wrong results are excluded from calls of the same
// signature on the same device.
namespace te_fl::dispatch {

// The build id of the owner of an implementation: the plugin's; te-fl's own for built-in backends.
std::string find_build_id(const std::string& owner);
// The name and driver of a device, as its provider reports them; empty if it does not.
struct Chip {
  std::string name, driver;
};
Chip find_chip(const Device& device);

// Stores an entry that takes effect later (take_held() or te_fl::step_boundary()). Keeps one entry
// per implementation, signature and device.
void hold(Quarantine entry);
// Records that a call on this stream is being captured. Entries of hold() take effect only after
// the capture.
void note_capture(const Device& device, void* stream);
// Puts the entries of hold() into effect, unless the job has several ranks or a stream is being
// captured. Must be called between two calls of the thread, outside of ops.
void take_held();
// While an Unwatched object exists, the thread's choices ignore the quarantine and its calls are
// not verified.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
  static bool now() noexcept;
};

}  // namespace te_fl::dispatch
