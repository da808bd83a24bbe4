#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/op/op_table.hpp"
#include "policy/select.hpp"
#include "registry/implementation.hpp"
#include "te_fl/status.hpp"

namespace te_fl::registry {

// An op and its implementations.
struct OpRow {
  std::shared_ptr<const core::CompiledOp> compiled;
  const te_fl_arg_desc* saved = nullptr;  // its te_fl_saved argument; null: none
  std::vector<std::shared_ptr<Implementation>> impls;
  std::vector<policy::Implementation> views;  // the entries of impls as decide() reads them
};

// A device on which no op may run: it is lost, or was withdrawn with its plugin.
struct BarredDevice {
  Device device;
  Status why;  // the error that calls on the device return
};

using NameMap = std::map<std::string, uint32_t, std::less<>>;

// Everything that is registered at one moment. Immutable after publication. Tables share unchanged
// rows.
struct Table {
  uint64_t id = 0;  // unique in the process; changes with every registration
  // Indexed by op id; null for retired ids. Custom ops follow the catalogue's ops.
  std::vector<std::shared_ptr<const OpRow>> ops;
  std::shared_ptr<const NameMap> names;
  std::vector<BarredDevice> barred;

  // The row of an op; null if there is no such op.
  const OpRow* row(uint32_t id) const { return id < ops.size() ? ops[id].get() : nullptr; }
  const BarredDevice* barred_device(const Device& device) const {
    for (const BarredDevice& b : barred) {
      if (b.device == device) return &b;
    }
    return nullptr;
  }
};

}  // namespace te_fl::registry
