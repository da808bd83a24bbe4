#pragma once

#include <cstdint>

#include "te_fl/plugin.h"

// The managed tensors of DLPack 1.1, with its layout. The names differ from DLPack's, so that a
// program may include DLPack's header too.
namespace te_fl::core {

struct DlpackManaged {  // DLPack's DLManagedTensor
  te_fl_dltensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DlpackManaged* self);
};

struct DlpackVersion {
  uint32_t major;
  uint32_t minor;
};

inline constexpr DlpackVersion kDlpackVersion{1, 1};

enum : uint64_t {  // bits of DlpackVersioned.flags
  kDlpackReadOnly = 1u << 0,
  kDlpackIsCopied = 1u << 1,
  kDlpackSubbytePadded = 1u << 2
};

struct DlpackVersioned {  // DLPack's DLManagedTensorVersioned
  DlpackVersion version;
  void* manager_ctx;
  void (*deleter)(DlpackVersioned* self);
  uint64_t flags;
  te_fl_dltensor dl_tensor;
};

static_assert(sizeof(te_fl_dltensor) == 48 && sizeof(DlpackManaged) == 64 &&
              sizeof(DlpackVersioned) == 80 && offsetof(DlpackVersioned, dl_tensor) == 32);

}  // namespace te_fl::core
