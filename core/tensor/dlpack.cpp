#include "core/tensor/dlpack.hpp"

#include <algorithm>
#include <memory>

#include "core/base/text.hpp"
#include "core/tensor/tensor_access.hpp"

namespace te_fl {
namespace {

using core::DlpackManaged;
using core::DlpackVersioned;

Status refuse(const std::string& why) { return invalid_argument("DLPack import: " + why); }

Status check_version(const DlpackVersioned& managed) {
  const core::DlpackVersion& v = managed.version;
  if (v.major != core::kDlpackVersion.major) {
    return Status(StatusCode::kIncompatible,
                  "DLPack import: the tensor is of DLPack version " + std::to_string(v.major) +
                      "." + std::to_string(v.minor) + ", this build reads version " +
                      std::to_string(core::kDlpackVersion.major) +
                      ".x; ask the producer for max_version=(1, 1)");
  }
  if ((managed.flags & core::kDlpackReadOnly) != 0) {
    return refuse(
        "the tensor is read-only, and te-fl cannot promise not to write to it; copy it first");
  }
  if ((managed.flags & core::kDlpackSubbytePadded) != 0) {
    return refuse("elements smaller than a byte are padded to a byte; te-fl packs them");
  }
  return {};
}

// Finds te-fl's device for a DLPack device. DLPack has no provider, so the index of an extension
// device must be unambiguous.
Result<Device> to_device(const te_fl_dltensor& dl) {
  Device device{dl.device.type, dl.device.index, 0};
  if (device.type != TE_FL_DEVICE_EXT) return device;
  int matches = 0;
  for (const Device& d : devices::list()) {
    if (d.type != device.type || d.index != device.index) continue;
    device = d;
    ++matches;
  }
  if (matches == 1) return device;
  return refuse(
      "the tensor is on extension device " + std::to_string(device.index) + ", which " +
      (matches == 0 ? "no plugin provides" : "several plugins provide; wrap() its memory instead"));
}

// Validates a DLPack tensor and describes it. The caller fills in `storage`.
Result<Tensor::Access::Parts> make_parts(const te_fl_dltensor& dl) {
  if (dl.ndim < 0 || dl.ndim > kMaxRank) {
    return refuse("rank " + std::to_string(dl.ndim) + " is not within 0 to " +
                  std::to_string(kMaxRank));
  }
  if (dl.ndim > 0 && dl.shape == nullptr) return refuse("shape is null");
  const Result<DType> dtype = dtype_from_c(dl.dtype);
  if (!dtype) return dtype.status().wrap("DLPack import");
  const auto rank = static_cast<size_t>(dl.ndim);
  const std::span<const int64_t> shape(dl.shape, rank);
  const std::span<const int64_t> strides(dl.strides, dl.strides != nullptr ? rank : 0);
  const void* first =
      dl.data == nullptr ? nullptr : static_cast<const char*>(dl.data) + dl.byte_offset;
  const Status layout = core::check_view(first, shape, strides, *dtype);
  if (!layout) return layout.wrap("DLPack import");
  TE_FL_ASSIGN_OR_RETURN(const Device device, to_device(dl));
  return Tensor::Access::Parts{dl.data, shape, strides, *dtype, device, nullptr, dl.byte_offset};
}

template <class Managed>
Result<Tensor> import(Managed* managed) {
  TE_FL_ASSIGN_OR_RETURN(Tensor::Access::Parts parts, make_parts(managed->dl_tensor));
  Tensor probe = Tensor::Access::make(parts);
  if (parts.dtype == DType::kF4E2M1 && !probe.contiguous()) {
    return refuse("4-bit elements with strides; make the tensor compact");
  }
  // From here on only the allocation of the control block can fail; shared_ptr then runs the
  // deleter.
  parts.storage = std::shared_ptr<void>(managed, [](void* p) {
    auto* m = static_cast<Managed*>(p);
    if (m->deleter != nullptr) m->deleter(m);
  });
  return Tensor::Access::make(parts);
}

// The manager_ctx of an exported tensor. Owns the tensor's storage and the arrays that dl_tensor
// points to.
template <class Managed>
struct Export {
  Managed managed{};
  Tensor tensor;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};
};

template <class Managed>
Managed* make_export(const Tensor& tensor) {
  auto owner = std::make_unique<Export<Managed>>();
  owner->tensor = tensor;
  std::copy(tensor.shape().begin(), tensor.shape().end(), owner->shape.begin());
  std::copy(tensor.strides().begin(), tensor.strides().end(), owner->strides.begin());
  Managed& m = owner->managed;
  m.dl_tensor = tensor.c()->dl;
  m.dl_tensor.shape = owner->shape.data();
  m.dl_tensor.strides = owner->strides.data();
  m.deleter = [](Managed* self) { delete static_cast<Export<Managed>*>(self->manager_ctx); };
  m.manager_ctx = owner.get();
  return &owner.release()->managed;
}

}  // namespace

Result<Tensor> Tensor::from_dlpack(void* managed, bool versioned) {
  if (managed == nullptr) return refuse("the managed tensor is null");
  if (!versioned) return import(static_cast<DlpackManaged*>(managed));
  auto* tensor = static_cast<DlpackVersioned*>(managed);
  TE_FL_RETURN_IF_ERROR(check_version(*tensor));
  return import(tensor);
}

Result<void*> Tensor::to_dlpack(bool versioned) const {
  if (!defined()) return invalid_argument("DLPack export: the tensor is undefined");
  if (quantized()) {
    return invalid_argument(
        "DLPack export: " + describe() +
        " is quantised, which DLPack cannot say; export its parts (rowwise_codes(), "
        "scale_inv(), ...)");
  }
  if (!versioned) return static_cast<void*>(make_export<DlpackManaged>(*this));
  DlpackVersioned* managed = make_export<DlpackVersioned>(*this);
  managed->version = core::kDlpackVersion;
  return static_cast<void*>(managed);
}

}  // namespace te_fl
