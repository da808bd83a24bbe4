#pragma once

#include <functional>
#include <string>
#include <vector>

#include "te_fl/comm.hpp"
#include "te_fl/device.hpp"
#include "te_fl/status.hpp"

namespace te_fl::conformance {

// Ranks that are threads of this process, each with its own device or all on the host. The
// communicators are those of the plugin that owns the implementation.
class Ranks {
 public:
  // UNSUPPORTED if there are fewer devices than ranks.
  static te_fl::Result<Ranks> create(const std::string& op, const std::string& impl_id,
                                     const Device& device, int size);

  int size() const { return static_cast<int>(comms_.size()); }
  Comm& operator[](int rank) { return comms_[static_cast<size_t>(rank)]; }
  // Calls f(rank) on one thread per rank, or on this thread if there is one rank. Returns when all
  // calls have returned.
  void run(const std::function<void(int rank)>& f) const;
  // The error of the first rank whose communicator failed; OK if none failed.
  Status status() const;

 private:
  explicit Ranks(int size) : comms_(static_cast<size_t>(size)) {}
  std::vector<Comm> comms_;
};

// Options for one of `size` ranks, on consecutive devices from `device` on, with the provider of
// the implementation's plugin. The caller sets the store. UNSUPPORTED if there are not enough
// devices.
te_fl::Result<CommOptions> comm_options(const std::string& op, const std::string& impl_id,
                                        const Device& device, int rank, int size);
// The device of a rank, where rank 0 has `device`.
Device rank_device(const Device& device, int rank);

}  // namespace te_fl::conformance
