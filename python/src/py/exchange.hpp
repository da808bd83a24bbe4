// DLPack's C exchange API: passes tensors between libraries by C function calls.
#pragma once

#include <forward_list>
#include <vector>

#include "py/py.hpp"
#include "te_fl/device.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// Structs of DLPack 1.x, declared from its specification (https://dmlc.github.io/dlpack). Their
// layout is ABI.
struct Version {
  uint32_t major, minor;
};
struct Managed {
  te_fl_dltensor tensor;
  void* context;
  void (*deleter)(Managed*);
};
struct ManagedVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  te_fl_dltensor tensor;
};
inline constexpr uint64_t kReadOnly = 1;
struct ExchangeHeader {
  Version version;
  const ExchangeHeader* previous;
};
struct Exchange {
  ExchangeHeader header;
  int (*allocate)(te_fl_dltensor*, ManagedVersioned**, void*,
                  void (*)(void*, const char*, const char*));
  int (*from_object)(void*, ManagedVersioned**);
  int (*to_object)(ManagedVersioned*, void**);
  int (*describe)(void*, te_fl_dltensor*);  // borrowed; null only in the table of an older PyTorch
  int (*current_stream)(int32_t, int32_t, void**);
};

// The exchange table of tensors of `type`, looked up once per type; null: the type supports
// `__dlpack__` only.
const Exchange* find_exchange(PyTypeObject* type);

// The te-fl device for a DLPack device, which does not name a vendor. An error unless exactly one
// plugin has such a device.
Result<Device> to_device(const te_fl_device& device);

// Shapes and strides of described tensors.
using Extents = std::forward_list<std::vector<int64_t>>;

// Describes the borrowed memory of an object. The result's shape and strides live as long as the
// object and `extents`. For an object without memory, the error names the object and gives the
// library's reason without its C++ stack trace.
te_fl_dltensor describe(const Exchange& api, PyObject* object, const char* name, Extents& extents);

// The current stream of the device in the library of `api`; null is the default stream.
void* current_stream(const Exchange& api, const te_fl_device& device);

}  // namespace te_fl::python
