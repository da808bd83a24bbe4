// DLPack's C exchange API: tensors that cross between libraries by a function call.
#pragma once

#include "py.hpp"
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

// What tensors of `type` are exchanged by, which is looked up once; null: by __dlpack__ alone.
const Exchange* exchange_of(PyTypeObject* type);

}  // namespace te_fl::python
