#include "comm/nccl_comm.hpp"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "comm/nccl_group.hpp"
#include "comm/nccl_ranks.hpp"
#include "device/cuda_check.hpp"

namespace te_fl::cuda {
namespace {

NcclRanks& ranks_of(void* comm) { return *static_cast<NcclRanks*>(comm); }

const Nccl& need_nccl() {
  refuse_after_fork();
  if (const Nccl* found = nccl(); found != nullptr) return *found;
  throw backend::Error(TE_FL_NOT_FOUND | TE_FL_CLEAN, nccl_missing());
}

te_fl_status unique_id(void*, void* id, size_t capacity, size_t* bytes,
                       const te_fl_error_sink* errors) noexcept {
  return backend::guard(errors, [&] {
    const Nccl& n = need_nccl();
    *bytes = sizeof(NcclUniqueId);
    if (capacity < sizeof(NcclUniqueId)) return;
    NcclUniqueId made;
    if (const int status = n.unique_id(&made); status != kNcclSuccess)
      throw_nccl(n, status, "ncclGetUniqueId", nullptr);
    std::memcpy(id, &made, sizeof made);
  });
}

NcclRanks* begin(const Nccl& n, const te_fl_comm_config& config, const NcclUniqueId& id) {
  return new NcclRanks(n, config, "ncclCommInitRank",
                       [&n, id, size = config.size, rank = config.rank](void** handle) {
                         return n.create(handle, size, id, rank);
                       });
}

te_fl_status create(void*, const te_fl_comm_config* config, void** comm,
                    const te_fl_error_sink* errors) noexcept {
  return backend::guard(errors, [&] {
    const Nccl& n = need_nccl();
    NcclUniqueId id;
    if (config->id_bytes != sizeof id) {
      backend::invalid("te_fl_comm_config.id has " + std::to_string(config->id_bytes) +
                       " bytes, must have " + std::to_string(sizeof id) +
                       ", those that unique_id() returned on rank 0");
    }
    std::memcpy(&id, config->id, sizeof id);
    *comm = begin(n, *config, id);
  });
}

// Returns the NCCL unique id of a communicator if the host supplied none. Rank 0 creates the id and
// writes it to the store; the other ranks read it from the store.
NcclUniqueId id_by_store(const Nccl& n, const te_fl_comm_config& config,
                         const te_fl_error_sink* errors) {
  constexpr const char* kKey = "nccl_id";
  const te_fl_comm_store& store = *config.store;
  NcclUniqueId id;
  size_t bytes = 0;
  te_fl_status status = TE_FL_OK;
  if (config.rank == 0) {
    if (const int failed = n.unique_id(&id); failed != kNcclSuccess)
      throw_nccl(n, failed, "ncclGetUniqueId", nullptr);
    status = store.set(store.host, kKey, &id, sizeof id, errors);
  } else {
    status = store.get(store.host, kKey, config.timeout_ms, &id, sizeof id, &bytes, errors);
  }
  if (status != TE_FL_OK) throw backend::Error(status, "the store has no id of NCCL's");
  return id;
}

te_fl_status split(void* comm, const te_fl_comm_config* config, int32_t color, void** out,
                   const te_fl_error_sink* errors) noexcept {
  return backend::guard(errors, [&] {
    refuse_after_fork();
    const NcclRanks& parent = ranks_of(comm);
    const Nccl& n = parent.nccl();
    if (n.split == nullptr) {
      *out = begin(n, *config, id_by_store(n, *config, errors));
      return;
    }
    auto use = std::make_shared<NcclRanks::Use>(parent);
    *out = new NcclRanks(n, *config, "ncclCommSplit",
                         [&n, use, color, key = config->rank](void** handle) mutable {
                           const auto held = std::move(use);  // released when the call returns
                           return n.split(held->handle(), color, key, handle, nullptr);
                         });
  });
}

te_fl_status ready(void* comm, int32_t* done, const te_fl_error_sink* errors) noexcept {
  return backend::guard(errors, [&] { *done = ranks_of(comm).ready() ? 1 : 0; });
}

te_fl_status async_error(void* comm, const te_fl_error_sink* errors) noexcept {
  return backend::guard(errors, [&] { ranks_of(comm).check(); });
}

void destroy(void* comm) noexcept { delete static_cast<NcclRanks*>(comm); }

void abort(void* comm) noexcept {
  (void)backend::guard(nullptr, [&] { ranks_of(comm).abort(); });
}

te_fl_status group_start(void*, const te_fl_error_sink* errors) noexcept {
  return backend::guard(errors, [] { begin_group(need_nccl()); });
}

te_fl_status group_end(void*, const te_fl_error_sink* errors) noexcept {
  return backend::guard(errors, [] { end_group(need_nccl()); });
}

const char* version(void*) noexcept {
  const Nccl* found = nccl();
  return found == nullptr ? nullptr : found->compared_text.c_str();
}

constexpr te_fl_comm_api kApi = {
    .unique_id = unique_id,
    .create = create,
    .ready = ready,
    .split = split,
    .destroy = destroy,
    .abort = abort,
    .async_error = async_error,
    .group_start = group_start,
    .group_end = group_end,
    .version = version,
};
constexpr te_fl_comm_desc kDesc = {
    .flags = TE_FL_COMM_CAPTURABLE,
    .name = "nccl",
    .kind = TE_FL_KIND_VENDOR,
    .device_types = uint64_t{1} << TE_FL_DEVICE_CUDA,
    .api = &kApi,
};

}  // namespace

const te_fl_comm_desc& nccl_comm_desc() noexcept { return kDesc; }

}  // namespace te_fl::cuda
