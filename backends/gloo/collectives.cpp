#include "collectives.hpp"

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "communicator.hpp"
#include "reduce.hpp"
#include "te_fl/backend/collective.hpp"
#include "te_fl/ops/collective.h"
#include "te_fl/ops/moe.h"

namespace te_fl::gloo_ranks {
namespace {

using backend::bytes_of;
using backend::data;

size_t bytes(const te_fl_tensor& t) { return static_cast<size_t>(backend::bytes_of(t)); }

void copy(void* to, const void* from, size_t n) {
  if (n != 0 && to != from) std::memcpy(to, from, n);
}

Communicator& to_communicator(const te_fl_communicator* comm) {
  return backend::communicator<Communicator>(comm);
}

// ---- what the calls of the ranks must have in common

enum class Op : uint8_t {
  kAllReduce,
  kShare,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kAllToAllV,
  kMoeDispatch,
  kMoeCombine,
  kBroadcast,
  kReceived,
  kBarrier
};

// Returns a number that is equal on all ranks if they make the same call. It combines the op, the
// element dtype, and the reduction or root.
uint64_t pack_kind(Op op, const te_fl_dtype& type, int32_t detail = 0) {
  return static_cast<uint64_t>(op) << 56 | static_cast<uint64_t>(type.code) << 48 |
         static_cast<uint64_t>(type.bits) << 40 | static_cast<uint32_t>(detail);
}

// ---- reductions

// Divides n elements among the ranks and returns each rank's size in bytes. The sizes differ by at
// most one element.
std::vector<size_t> shares(size_t n, int ranks, size_t element_bytes) {
  std::vector<size_t> parts;
  const auto count = static_cast<size_t>(ranks);
  for (size_t r = 0; r < count; ++r) parts.push_back((n / count + (r < n % count)) * element_bytes);
  return parts;
}

// Returns the bytes of scratch for one part from each rank; 0 if there is only one rank.
size_t scratch_bytes(const te_fl_communicator& comm, size_t part_bytes) {
  return comm.size == 1 ? 0 : static_cast<size_t>(comm.size) * part_bytes;
}

// Reduces over all ranks the part of `input` that belongs to this rank, into `out`, which may be
// that part's memory.
void reduce_own(Communicator& comm, uint64_t kind, const Parts& input, Element element,
                int32_t reduction, char* scratch, char* out) {
  const auto rank = static_cast<size_t>(comm.rank());
  const size_t own = input.bytes[rank];
  const Parts theirs(scratch, comm.size(), own);
  comm.exchange(kind, input, theirs);
  std::vector<const char*> parts;
  for (const size_t at : theirs.offset) parts.push_back(scratch + at);
  parts[rank] = input.base + input.offset[rank];
  reduce_parts(element, reduction, parts.data(), comm.size(), own / gloo_ranks::bytes_of(element),
               out);
}

void all_reduce_halves(Communicator& comm, const te_fl_all_reduce_args& a, Element element,
                       char* scratch) {
  const size_t width = gloo_ranks::bytes_of(element), n = bytes(*a.input) / width;
  const auto rank = static_cast<size_t>(comm.rank());
  const std::vector<size_t> parts = shares(n, comm.size(), width);
  const Parts out(data<char>(*a.output), parts);
  reduce_own(comm, pack_kind(Op::kAllReduce, a.input->dl.dtype, a.reduction),
             Parts(data<char>(*a.input), parts), element, a.reduction, scratch,
             out.base + out.offset[rank]);
  Parts own(out.base + out.offset[rank], comm.size(), out.bytes[rank]);
  for (size_t& at : own.offset) at = 0;  // every rank receives the same part
  comm.exchange(pack_kind(Op::kShare, a.input->dl.dtype, a.reduction), own, out);
}

template <class T>
void all_reduce_by_gloo(Communicator& comm, const te_fl_all_reduce_args& a, Element element) {
  const size_t n = bytes(*a.input) / sizeof(T);
  ::gloo::AllreduceOptions options(comm.mesh());
  if (data<T>(*a.input) != data<T>(*a.output)) options.setInput(data<T>(*a.input), n);
  options.setOutput(data<T>(*a.output), n);
  options.setReduceFunction(pairwise(element, a.reduction));
  const uint64_t kind = pack_kind(Op::kAllReduce, a.input->dl.dtype, a.reduction);
  options.setTag(comm.next_tag(kind, bytes(*a.input)));
  ::gloo::allreduce(options);
  if (a.reduction == TE_FL_REDUCTION_AVG) divide(element, data<T>(*a.output), n, comm.size());
}

void all_reduce(Communicator& comm, const te_fl_context& ctx, const te_fl_all_reduce_args& a) {
  const Element element = to_element(a.input->dl.dtype);
  if (comm.size() == 1) return copy(data<char>(*a.output), data<char>(*a.input), bytes(*a.input));
  if (bytes(*a.input) == 0) return;
  if (is_half(element))
    return all_reduce_halves(comm, a, element, static_cast<char*>(ctx.workspace));
  if (gloo_ranks::bytes_of(element) == 8) return all_reduce_by_gloo<int64_t>(comm, a, element);
  all_reduce_by_gloo<int32_t>(comm, a, element);
}

void reduce_scatter(Communicator& comm, const te_fl_context& ctx,
                    const te_fl_reduce_scatter_args& a) {
  if (comm.size() == 1) return copy(data<char>(*a.output), data<char>(*a.input), bytes(*a.input));
  if (bytes(*a.input) == 0) return;
  reduce_own(comm, pack_kind(Op::kReduceScatter, a.input->dl.dtype, a.reduction),
             Parts(data<char>(*a.input), comm.size(), bytes(*a.output)),
             to_element(a.input->dl.dtype), a.reduction, static_cast<char*>(ctx.workspace),
             data<char>(*a.output));
}

size_t workspace(const te_fl_context&, const te_fl_reduce_scatter_args& a) {
  return scratch_bytes(*a.comm, bytes(*a.output));
}
size_t workspace(const te_fl_context&, const te_fl_all_reduce_args& a) {
  const Element element = to_element(a.input->dl.dtype);
  if (!is_half(element)) return 0;
  const size_t width = gloo_ranks::bytes_of(element);
  const auto ranks = static_cast<size_t>(a.comm->size);
  return scratch_bytes(*a.comm, (bytes(*a.input) / width + ranks - 1) / ranks * width);
}

// ---- copies

void all_gather(Communicator& comm, const te_fl_context&, const te_fl_all_gather_args& a) {
  const size_t part = bytes(*a.input);
  char* const out = data<char>(*a.output);
  char* const own = out + static_cast<size_t>(comm.rank()) * part;
  if (comm.size() == 1 || part == 0) return copy(own, data<char>(*a.input), part);
  ::gloo::AllgatherOptions options(comm.mesh());
  if (own != data<char>(*a.input)) options.setInput(data<char>(*a.input), part);
  options.setOutput(out, part * static_cast<size_t>(comm.size()));
  options.setTag(comm.next_tag(pack_kind(Op::kAllGather, a.input->dl.dtype), part));
  ::gloo::allgather(options);
}

void exchange_copied(Communicator& comm, uint64_t kind, const Parts& in, const Parts& out) {
  const auto rank = static_cast<size_t>(comm.rank());
  copy(out.base + out.offset[rank], in.base + in.offset[rank], in.bytes[rank]);
  if (comm.size() > 1) comm.exchange(kind, in, out);
}

void all_to_all(Communicator& comm, const te_fl_context&, const te_fl_all_to_all_args& a) {
  const size_t part = bytes(*a.input) / static_cast<size_t>(comm.size());
  exchange_copied(comm, pack_kind(Op::kAllToAll, a.input->dl.dtype),
                  Parts(data<char>(*a.input), comm.size(), part),
                  Parts(data<char>(*a.output), comm.size(), part));
}

std::vector<size_t> bytes_of_rows(const int64_t* rows, const te_fl_tensor& t, int ranks) {
  std::vector<size_t> parts;
  for (int r = 0; r < ranks; ++r)
    parts.push_back(static_cast<size_t>(rows[r] * backend::row_bytes(t)));
  return parts;
}

void all_to_all_v(Communicator& comm, const te_fl_context&, const te_fl_all_to_all_v_args& a) {
  const int ranks = comm.size();
  const auto rank = static_cast<size_t>(comm.rank());
  if (a.input_rows[rank] != a.output_rows[rank]) {
    backend::invalid("argument 'output_rows' has " + std::to_string(a.output_rows[rank]) +
                     " rows from this very rank " + std::to_string(rank) +
                     ", for which 'input_rows' has " + std::to_string(a.input_rows[rank]));
  }
  exchange_copied(comm, pack_kind(Op::kAllToAllV, a.input->dl.dtype),
                  Parts(data<char>(*a.input), bytes_of_rows(a.input_rows, *a.input, ranks)),
                  Parts(data<char>(*a.output), bytes_of_rows(a.output_rows, *a.input, ranks)));
}

// ---- rows of experts

// Copies the rows of each rank and expert between a tensor that is ordered by expert and scratch
// that is ordered by rank.
void regroup(const char* from, const std::vector<int64_t>& from_begins, char* to,
             const std::vector<int64_t>& to_begins, const int64_t* rows, int64_t row_bytes) {
  for (size_t i = 0; i < from_begins.size(); ++i) {
    copy(to + to_begins[i] * row_bytes, from + from_begins[i] * row_bytes,
         static_cast<size_t>(rows[i] * row_bytes));
  }
}

// Returns the bytes for each rank.
std::vector<size_t> bytes_by_rank(const int64_t* rows, int64_t experts, int ranks, int64_t row) {
  std::vector<size_t> parts(static_cast<size_t>(ranks));
  for (int64_t i = 0; i < ranks * experts; ++i) {
    parts[static_cast<size_t>(i / experts)] += static_cast<size_t>(rows[i] * row);
  }
  return parts;
}

// Exchanges one part with each rank. Rows that are ordered by expert are regrouped in scratch: by
// moe_dispatch after they have arrived, by moe_combine before they are sent.
template <bool kDispatches>
void move_rows(Communicator& comm, const te_fl_context& ctx, const te_fl_moe_transfer_args& a) {
  const int ranks = comm.size();
  const int64_t count = a.input_rows_count, experts = count / ranks;
  const int64_t* const regrouped = kDispatches ? a.output_rows : a.input_rows;
  const std::vector<int64_t> by_rank = backend::begins_by_rank(regrouped, count);
  const std::vector<int64_t> by_expert = backend::begins_by_expert(regrouped, count, ranks);
  int32_t tensor = 0;
  for (const backend::MovedRows& t : backend::moved_rows(a)) {
    char* const scratch = experts > 1 ? static_cast<char*>(ctx.workspace) : nullptr;
    char* from = const_cast<char*>(t.from);
    char* to = t.to;
    if (scratch != nullptr) (kDispatches ? to : from) = scratch;
    if (scratch != nullptr && !kDispatches)
      regroup(t.from, by_expert, scratch, by_rank, regrouped, t.row_bytes);
    exchange_copied(
        comm,
        pack_kind(kDispatches ? Op::kMoeDispatch : Op::kMoeCombine, a.input->dl.dtype, tensor++),
        Parts(from, bytes_by_rank(a.input_rows, experts, ranks, t.row_bytes)),
        Parts(to, bytes_by_rank(a.output_rows, experts, ranks, t.row_bytes)));
    if (scratch != nullptr && kDispatches)
      regroup(scratch, by_rank, t.to, by_expert, regrouped, t.row_bytes);
  }
}

template <bool kDispatches>
size_t rows_scratch(const te_fl_context&, const te_fl_moe_transfer_args& a) {
  if (a.input_rows_count == a.comm->size) return 0;  // one expert on each rank
  size_t most = 0;
  for (const te_fl_tensor* t :
       {kDispatches ? a.output : a.input, kDispatches ? a.output_probs : a.probs,
        kDispatches ? a.output_scales : a.scales}) {
    if (t != nullptr) most = std::max(most, bytes(*t));
  }
  return most;
}

// Each rank sends the root one byte to confirm that it has received the data. Without this, if
// several ranks passed themselves as root, their sends would have no receiver, but no rank would
// report an error.
void confirm_to_root(Communicator& comm, uint64_t kind, int32_t root) {
  std::vector<size_t> to(static_cast<size_t>(comm.size())), from(to);
  if (comm.rank() == root) {
    from.assign(from.size(), 1);
  } else {
    to[static_cast<size_t>(root)] = 1;
  }
  std::vector<char> out(1), in(from.size());
  comm.exchange(kind, Parts(out.data(), std::move(to)), Parts(in.data(), std::move(from)));
}

void broadcast(Communicator& comm, const te_fl_context&, const te_fl_broadcast_args& a) {
  if (comm.size() == 1 || bytes(*a.data) == 0) return;
  ::gloo::BroadcastOptions options(comm.mesh());
  options.setOutput(data<char>(*a.data), bytes(*a.data));
  options.setRoot(a.root);
  const uint64_t kind = pack_kind(Op::kBroadcast, a.data->dl.dtype, a.root);
  options.setTag(comm.next_tag(kind, bytes(*a.data)));
  ::gloo::broadcast(options);
  confirm_to_root(comm, pack_kind(Op::kReceived, a.data->dl.dtype, a.root), a.root);
}

void barrier(Communicator& comm, const te_fl_context&, const te_fl_barrier_args&) {
  if (comm.size() == 1) return;
  ::gloo::BarrierOptions options(comm.mesh());
  options.setTag(comm.next_tag(pack_kind(Op::kBarrier, {}), 0));
  ::gloo::barrier(options);
}

// ---- groups, and the calls that they may contain

// A send or receive between group_start() and group_end().
struct Kept {
  Communicator* comm = nullptr;
  const char* op = nullptr;
  bool sends = false;
  char* data = nullptr;
  size_t bytes = 0;
  int peer = 0;
  Transfer transfer;
  void begin() {
    transfer = sends ? comm->begin_send(data, bytes, peer) : comm->begin_receive(data, bytes, peer);
  }
  void wait() { comm->wait(transfer); }
};
struct Group {
  int depth = 0;
  std::vector<Kept> calls;
};
thread_local Group group;

void transfer(Kept call) {
  if (group.depth > 0) {
    group.calls.push_back(std::move(call));
    return;
  }
  call.comm->run(call.op, [&] {
    call.begin();
    call.wait();
  });
}

void send(const te_fl_context&, const te_fl_send_args& a) {
  transfer(
      {&to_communicator(a.comm), "send", true, data<char>(*a.input), bytes(*a.input), a.peer, {}});
}
void recv(const te_fl_context&, const te_fl_recv_args& a) {
  transfer({&to_communicator(a.comm),
            "recv",
            false,
            data<char>(*a.output),
            bytes(*a.output),
            a.peer,
            {}});
}

// ---- descriptors

constexpr char kAllReduce[] = "all_reduce", kAllGather[] = "all_gather",
               kReduceScatter[] = "reduce_scatter", kAllToAll[] = "all_to_all",
               kAllToAllV[] = "all_to_all_v", kMoeDispatch[] = "moe_dispatch",
               kMoeCombine[] = "moe_combine", kBroadcast[] = "broadcast", kSend[] = "send",
               kRecv[] = "recv", kBarrier[] = "barrier";

template <class Args, auto F, const char* kName>
void with_all(const te_fl_context& ctx, const Args& a) {
  Communicator& comm = to_communicator(a.comm);
  comm.run(kName, [&] { F(comm, ctx, a); });
}

template <class Args, auto F>
te_fl_op_desc& append(std::vector<te_fl_op_desc>& ops, const char* name) {
  te_fl_op_desc desc;
  desc.op_name = name;
  desc.impl_id = "default.gloo";
  desc.kind = TE_FL_KIND_DEFAULT;
  desc.flags = TE_FL_OP_THREAD_SAFE | TE_FL_OP_DETERMINISTIC | TE_FL_OP_IN_PLACE_OK;
  desc.device_types = TE_FL_BIT(TE_FL_DEVICE_CPU) | TE_FL_BIT(TE_FL_DEVICE_CUDA_HOST) |
                      TE_FL_BIT(TE_FL_DEVICE_ROCM_HOST);
  desc.run = backend::run_thunk<Args, F>;
  desc.supports = backend::supports_thunk<Args, backend::check_collective<Args>>;
  ops.push_back(desc);
  return ops.back();
}

template <class Args, auto F, const char* kName>
te_fl_op_desc& append_all(std::vector<te_fl_op_desc>& ops) {
  return append<Args, with_all<Args, F, kName>>(ops, kName);
}

template <class Args>
size_t required_workspace(const te_fl_context& ctx, const Args& a) {
  return workspace(ctx, a);
}

}  // namespace

void append_collectives(std::vector<te_fl_op_desc>& ops) {
  append_all<te_fl_all_reduce_args, all_reduce, kAllReduce>(ops).workspace =
      backend::workspace_thunk<te_fl_all_reduce_args, required_workspace<te_fl_all_reduce_args>>;
  append_all<te_fl_all_gather_args, all_gather, kAllGather>(ops);
  append_all<te_fl_reduce_scatter_args, reduce_scatter, kReduceScatter>(ops).workspace =
      backend::workspace_thunk<te_fl_reduce_scatter_args,
                               required_workspace<te_fl_reduce_scatter_args>>;
  append_all<te_fl_all_to_all_args, all_to_all, kAllToAll>(ops);
  append_all<te_fl_all_to_all_v_args, all_to_all_v, kAllToAllV>(ops);
  append_all<te_fl_moe_dispatch_args, move_rows<true>, kMoeDispatch>(ops).workspace =
      backend::workspace_thunk<te_fl_moe_dispatch_args, rows_scratch<true>>;
  append_all<te_fl_moe_combine_args, move_rows<false>, kMoeCombine>(ops).workspace =
      backend::workspace_thunk<te_fl_moe_combine_args, rows_scratch<false>>;
  append_all<te_fl_broadcast_args, broadcast, kBroadcast>(ops);
  append<te_fl_send_args, send>(ops, kSend);
  append<te_fl_recv_args, recv>(ops, kRecv);
  append_all<te_fl_barrier_args, barrier, kBarrier>(ops);
}

void group_start() { ++group.depth; }

// Starts all recorded transfers before it waits for any. After one fails, the remaining transfers
// of the same communicator fail immediately.
void group_end() {
  if (group.depth == 0) {
    throw backend::Error(TE_FL_FAILED_PRECONDITION,
                         "group_end() without group_start() on this thread");
  }
  if (--group.depth > 0) return;
  std::vector<Kept> calls = std::exchange(group.calls, {});
  std::optional<backend::Error> failed;
  for (void (Kept::*step)() : {&Kept::begin, &Kept::wait}) {
    for (Kept& call : calls) {
      try {
        call.comm->run(call.op, [&] { (call.*step)(); });
      } catch (const backend::Error& e) {
        if (!failed) failed = e;
      }
    }
  }
  if (failed) throw *failed;
}

}  // namespace te_fl::gloo_ranks
