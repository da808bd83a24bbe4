#include "te_fl/nn/autograd/saved_memory.hpp"

#include <algorithm>
#include <utility>

#include "core/tensor/tensor_access.hpp"

namespace te_fl::nn {

namespace {

// Memory ranges of one tensor, such as its column-wise data and scales, that are within this
// distance belong to one allocation and are moved together.
constexpr intptr_t kGap = 256;

int64_t reach_bytes(const Tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.rank(); ++i) last += (t.size(i) - 1) * t.strides()[static_cast<size_t>(i)];
  return bytes_for(t.dtype(), last + 1);
}

using Owners = std::vector<std::shared_ptr<void>>;

bool same_owner(const std::weak_ptr<void>& a, const std::weak_ptr<void>& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

const MovedMemory* find_holder(std::span<const MovedMemory> moved, const void* data,
                               const std::shared_ptr<void>& owner) {
  const auto found = std::ranges::find_if(moved, [&](const MovedMemory& m) {
    return data >= m.from && data < static_cast<const char*>(m.from) + m.bytes &&
           (same_owner(m.old_owner, {}) || same_owner(m.old_owner, owner));
  });
  return found == moved.end() ? nullptr : &*found;
}

bool holds(const Owners& owners, const std::shared_ptr<void>& owner) {
  return std::ranges::find(owners, owner) != owners.end();
}

// Redirects a pointer into memory of `owner` to the new location of that memory, and adds the owner
// of the new memory. False if the memory was not moved.
template <class T>
bool move_pointer(T*& pointer, const std::shared_ptr<void>& owner,
                  std::span<const MovedMemory> moved, Owners& owners) {
  const MovedMemory* m = pointer == nullptr ? nullptr : find_holder(moved, pointer, owner);
  if (m == nullptr) return pointer == nullptr;
  const auto offset = reinterpret_cast<const char*>(pointer) - static_cast<const char*>(m->from);
  pointer = reinterpret_cast<T*>(static_cast<char*>(m->to) + offset);
  owners.push_back(m->owner);
  return true;
}

void move_tensor(Tensor& t, std::span<const MovedMemory> moved) {
  if (!t.defined()) return;
  auto owners = std::make_shared<Owners>();
  void* data = t.raw_data();
  const std::shared_ptr<void> own = Tensor::Access::storage(t);
  if (!move_pointer(data, own, moved, *owners)) owners->push_back(own);
  te_fl_quant quant = Tensor::Access::quant(t);
  if (t.quantized()) {
    // A backward pass reads only the quantised data and the inverse scales.
    quant.amax = quant.scale = quant.columnwise_amax = nullptr;
    const std::shared_ptr<void> beside = Tensor::Access::quant_storage(t);
    bool all = move_pointer(quant.columnwise_data, beside, moved, *owners);
    all = move_pointer(quant.scale_inv, beside, moved, *owners) && all;
    all = move_pointer(quant.columnwise_scale_inv, beside, moved, *owners) && all;
    if (!all) owners->push_back(beside);
  }
  if (std::ranges::none_of(moved, [&](const MovedMemory& m) { return holds(*owners, m.owner); })) {
    return;
  }
  // A single owner is kept as it is, so that a later move finds the tensor by it.
  const std::shared_ptr<void> storage = owners->size() == 1 ? owners->front() : owners;
  Tensor made =
      Tensor::Access::make({data, t.shape(), t.strides(), t.dtype(), t.device(), storage});
  if (t.quantized()) Tensor::Access::set_quant(made, quant, owners);
  t = std::move(made);
}

struct Found {
  char* begin = nullptr;
  char* end = nullptr;
  std::shared_ptr<Owners> owners = std::make_shared<Owners>();
};

// Adds a memory range. Merges it with the last range if the gap between them is at most `gap`
// bytes.
void add(std::vector<Found>& found, const Found& part, intptr_t gap) {
  if (found.empty() || part.begin - found.back().end > gap) {
    found.push_back(part);
    return;
  }
  Found& last = found.back();
  last.end = std::max(last.end, part.end);
  last.owners->insert(last.owners->end(), part.owners->begin(), part.owners->end());
}

std::vector<Found> merged(std::vector<Found> parts, intptr_t gap) {
  std::ranges::sort(parts, {}, &Found::begin);
  std::vector<Found> found;
  for (const Found& part : parts) add(found, part, gap);
  return found;
}

Found find_memory(const Tensor& part) {
  Found found{.begin = static_cast<char*>(part.raw_data())};
  found.end = found.begin + reach_bytes(part);
  found.owners->push_back(std::make_shared<Tensor>(part));
  return found;
}

}  // namespace

std::vector<SavedMemory> saved_memory(Ctx& ctx, const Device& device) {
  std::vector<Found> all;
  ctx.visit([&](Tensor& t) {
    if (!t.defined() || t.device() != device || t.numel() == 0) return;
    const Tensor values = t.quantized() ? t.rowwise_codes() : t;
    if (values.defined()) all.push_back(find_memory(values));
    if (!t.quantized()) return;
    std::vector<Found> beside;
    for (const Tensor& part : {t.columnwise_codes(), t.scale_inv(), t.columnwise_scale_inv()}) {
      if (part.defined() && part.numel() > 0) beside.push_back(find_memory(part));
    }
    const auto joined = merged(std::move(beside), kGap);
    all.insert(all.end(), joined.begin(), joined.end());
  });
  std::vector<SavedMemory> memory;
  for (const Found& f : merged(std::move(all), -1)) {
    memory.push_back({f.begin, f.end - f.begin, f.owners});
  }
  return memory;
}

void move_saved_memory(Ctx& ctx, std::span<const MovedMemory> moved) {
  ctx.visit(Ctx::Visitor([&](Tensor& t) { move_tensor(t, moved); }, true));
}

}  // namespace te_fl::nn
