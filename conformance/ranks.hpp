#pragma once

#include <functional>
#include <string>
#include <vector>

#include "te_fl/comm.hpp"
#include "te_fl/device.hpp"
#include "te_fl/status.hpp"

namespace te_fl::conformance {

// Ranks that are threads of this process, each on a device of its own or all on the host, over the
// provider of the plugin that has an implementation.
class Ranks {
 public:
  // UNSUPPORTED if there are fewer devices than ranks.
  static te_fl::Result<Ranks> create(const std::string& op, const std::string& impl_id,
                                     const Device& device, int size);

  int size() const { return static_cast<int>(comms_.size()); }
  Comm& operator[](int rank) { return comms_[static_cast<size_t>(rank)]; }
  // f(rank) on as many threads; of one rank on this one. Returns when all have.
  void run(const std::function<void(int rank)>& f) const;
  // The first failure of a communicator.
  Status status() const;

 private:
  explicit Ranks(int size) : comms_(static_cast<size_t>(size)) {}
  std::vector<Comm> comms_;
};

// These options make one of `size` ranks, on devices from `device` on, by the provider of the
// plugin that has the implementation; the caller adds the store. UNSUPPORTED if there are fewer
// devices.
te_fl::Result<CommOptions> comm_options(const std::string& op, const std::string& impl_id,
                                        const Device& device, int rank, int size);
// The device of one rank, whose first has `device`.
Device device_of(const Device& device, int rank);

}  // namespace te_fl::conformance
