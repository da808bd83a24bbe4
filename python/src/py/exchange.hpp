// DLPack's C exchange API: tensors that cross between libraries by a function call.
#pragma once

#include "py/py.hpp"
#include "te_fl/device.hpp"
#include "te_fl/plugin.h"

namespace te_fl::python {

// DLPack 1.x as its specification describes it (https://dmlc.github.io/dlpack); the layout is ABI.
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
  int (*describe)(void*, te_fl_dltensor*);  // borrowed; may be null
  int (*current_stream)(int32_t, int32_t, void**);
};

// The exchange table of tensors of `type`, looked up once; null: they are exchanged by __dlpack__
// alone.
const Exchange* exchange_of(PyTypeObject* type);

// The device of that DLPack description, which names no vendor; te-fl's error unless one plugin
// alone has it.
Result<Device> device_of(const te_fl_device& device);

// Describes the memory of an object, which is borrowed. An object without memory is an error that
// names it and has the library's reason, without the library's stack of C++.
te_fl_dltensor describe(const Exchange& api, PyObject* object, const char* name);

// The current stream of the device in the library that `api` is of; null is the default stream.
void* current_stream(const Exchange& api, const te_fl_device& device);

}  // namespace te_fl::python
