#pragma once

#include <string>

#include "te_fl/device.hpp"
#include "te_fl/watch.hpp"

// Implementations that were caught with wrong results, and do not serve what they got wrong.
namespace te_fl::dispatch {

// Build id of who registered an implementation: the plugin's; te-fl's own for built-in backends.
std::string build_id_of(const std::string& owner);
// Name and driver of a device, as its provider gives them; empty where it gives none.
struct Chip {
  std::string name, driver;
};
Chip chip_of(const Device& device);

// Holds an entry until it may take effect. One entry per implementation, signature and device.
void hold(Quarantine entry);
// A call on this stream is being captured: until that ends, nothing that is held takes effect.
void note_capture(const Device& device, void* stream);
// Between two calls of the thread, which is inside no op: what is held takes effect, unless the job
// has several ranks or a stream is being captured.
void take_held();
// While one exists, the thread's choices know no quarantine, and its calls are not checked.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
  static bool now() noexcept;
};

}  // namespace te_fl::dispatch
