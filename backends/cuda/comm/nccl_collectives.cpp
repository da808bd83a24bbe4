// The collective ops on NCCL. They run on the call's stream.
#include <string>
#include <vector>

#include "comm/float_max.hpp"
#include "comm/nccl_group.hpp"
#include "common/dtype_bytes.hpp"
#include "plugin/families.hpp"
#include "te_fl/backend/collective.hpp"
#include "te_fl/backend/describe.hpp"
#include "te_fl/ops/collective.h"
#include "te_fl/ops/moe.h"

namespace te_fl::cuda {
namespace {

using backend::bytes_of;
using backend::numel;

cudaStream_t stream_of(const te_fl_context& ctx) { return static_cast<cudaStream_t>(ctx.stream); }
template <class Args>
const NcclRanks& ranks_of(const Args& a) {
  return backend::communicator<const NcclRanks>(a.comm);
}
size_t to_size(int64_t n) { return static_cast<size_t>(n); }
char* bytes(const te_fl_tensor& t) { return backend::data<char>(t); }

// ---- reductions

bool is_float(int dtype) { return dtype != TE_FL_I32 && dtype != TE_FL_I64; }

// The NCCL type of a dtype that reductions accept.
int nccl_type(int dtype) {
  switch (dtype) {
    case TE_FL_I32:
      return kNcclI32;
    case TE_FL_I64:
      return kNcclI64;
    case TE_FL_F16:
      return kNcclF16;
    case TE_FL_BF16:
      return kNcclBF16;
    case TE_FL_F64:
      return kNcclF64;
    default:
      return kNcclF32;
  }
}
int nccl_reduction(int32_t reduction) {
  return reduction == TE_FL_REDUCTION_MAX   ? kNcclMax
         : reduction == TE_FL_REDUCTION_AVG ? kNcclAvg
                                            : kNcclSum;
}

template <class Args>
bool takes_integers(const Args& a) {
  return a.reduction == TE_FL_REDUCTION_MAX && is_float(dtype_of(*a.input));
}

// Throws if the thread has an open NCCL group. NCCL starts a group's collectives when the group
// ends, so kernels that an op enqueues after its collective would run before it.
void refuse_in_group(const char* op) {
  if (!in_group()) return;
  throw backend::Error(TE_FL_FAILED_PRECONDITION | TE_FL_CLEAN,
                       std::string(op) +
                           " cannot be in a group of collectives of NCCL, since it needs scratch "
                           "memory that the group would outlive; call it outside");
}

// If the communicator has one rank, copies the input to the output, which completes the collective,
// and returns true. NCCL 2.28 would copy too, but takes more host time and keeps 176 bytes of host
// memory per reduction.
template <class Args>
bool of_one_rank(const te_fl_context& ctx, const Args& a, int64_t size) {
  if (a.comm->size != 1) return false;
  const NcclCall call(ranks_of(a));  // throws if the communicator was aborted
  if (bytes(*a.input) != bytes(*a.output)) {
    check(cudaMemcpyAsync(bytes(*a.output), bytes(*a.input), to_size(size),
                          cudaMemcpyDeviceToDevice, stream_of(ctx)),
          "cudaMemcpyAsync");
  }
  return true;
}
template <class Args>
bool of_one_rank(const te_fl_context& ctx, const Args& a) {
  return of_one_rank(ctx, a, bytes_of(*a.input));
}

template <class Args>
size_t reduction_scratch(const te_fl_context&, const Args& a) {
  return takes_integers(a) ? ordered_bytes(dtype_of(*a.input), numel(*a.input)) : 0;
}

void all_reduce(const te_fl_context& ctx, const te_fl_all_reduce_args& a) {
  const int64_t n = numel(*a.input);
  if (n == 0) return;
  if (of_one_rank(ctx, a)) return;
  const int dtype = dtype_of(*a.input);
  const cudaStream_t stream = stream_of(ctx);
  const bool integers = takes_integers(a);
  if (integers) refuse_in_group("all_reduce of the maximum of floats");
  const NcclCall call(ranks_of(a));
  if (!integers) {
    return call.check(
        call->all_reduce(bytes(*a.input), bytes(*a.output), to_size(n), nccl_type(dtype),
                         nccl_reduction(a.reduction), call.handle(), stream),
        "ncclAllReduce");
  }
  to_ordered(dtype, bytes(*a.input), ctx.workspace, n, stream);
  const int type = dtype == TE_FL_F64 ? kNcclI64 : kNcclI32;
  call.check(call->all_reduce(ctx.workspace, ctx.workspace, to_size(n), type, kNcclMax,
                              call.handle(), stream),
             "ncclAllReduce");
  from_ordered(dtype, ctx.workspace, bytes(*a.output), n, stream);
}

void reduce_scatter(const te_fl_context& ctx, const te_fl_reduce_scatter_args& a) {
  const int64_t part = numel(*a.output);
  if (part == 0) return;
  if (of_one_rank(ctx, a)) return;
  const int dtype = dtype_of(*a.input);
  const cudaStream_t stream = stream_of(ctx);
  const bool integers = takes_integers(a);
  if (integers) refuse_in_group("reduce_scatter of the maximum of floats");
  const NcclCall call(ranks_of(a));
  if (!integers) {
    return call.check(
        call->reduce_scatter(bytes(*a.input), bytes(*a.output), to_size(part), nccl_type(dtype),
                             nccl_reduction(a.reduction), call.handle(), stream),
        "ncclReduceScatter");
  }
  to_ordered(dtype, bytes(*a.input), ctx.workspace, numel(*a.input), stream);
  const int type = dtype == TE_FL_F64 ? kNcclI64 : kNcclI32;
  char* own =
      static_cast<char*>(ctx.workspace) + ordered_bytes(dtype, part) * to_size(a.comm->rank);
  call.check(call->reduce_scatter(ctx.workspace, own, to_size(part), type, kNcclMax, call.handle(),
                                  stream),
             "ncclReduceScatter");
  from_ordered(dtype, own, bytes(*a.output), part, stream);
}

// Refuses a reduction if the call requires determinism and NCCL's order of summation may vary.
// NCCL's ring and tree algorithms sum in the order of the ranks, which is the same in every run
// with the same ranks, machines and size. NVLink switches (NVLS) may sum in any order; Megatron
// also selects another algorithm for reproducible runs. The sum of two operands does not depend on
// their order.
template <class Args>
void check_reduction(const te_fl_context& ctx, const Args& a) {
  backend::check_collective(ctx, a);
  const bool ordered = a.reduction == TE_FL_REDUCTION_MAX || !is_float(dtype_of(*a.input)) ||
                       a.comm->size <= 2 || (ctx.flags & TE_FL_CALL_DETERMINISTIC) == 0;
  const Nccl* library = nccl();
  if (ordered || (library != nullptr && library->switches_are_out)) return;
  backend::unsupported(
      "NCCL may let NVLink's switches sum, in an order that is not always the same, and the call "
      "requires deterministic results; set NCCL_NVLS_ENABLE=0 on every rank, or NCCL_ALGO, before "
      "the program starts");
}

// ---- copies

void all_gather(const te_fl_context& ctx, const te_fl_all_gather_args& a) {
  const int64_t n = bytes_of(*a.input);
  if (n == 0) return;
  if (of_one_rank(ctx, a)) return;
  const NcclCall call(ranks_of(a));
  call.check(call->all_gather(bytes(*a.input), bytes(*a.output), to_size(n), kNcclU8, call.handle(),
                              stream_of(ctx)),
             "ncclAllGather");
}

void broadcast(const te_fl_context& ctx, const te_fl_broadcast_args& a) {
  const int64_t n = bytes_of(*a.data);
  if (n == 0) return;
  const NcclCall call(ranks_of(a));
  if (a.comm->size == 1) return;
  call.check(call->broadcast(bytes(*a.data), bytes(*a.data), to_size(n), kNcclU8, a.root,
                             call.handle(), stream_of(ctx)),
             "ncclBroadcast");
}

void send(const te_fl_context& ctx, const te_fl_send_args& a) {
  const int64_t n = bytes_of(*a.input);
  if (n == 0) return;
  const NcclCall call(ranks_of(a));
  call.check(
      call->send(bytes(*a.input), to_size(n), kNcclU8, a.peer, call.handle(), stream_of(ctx)),
      "ncclSend");
}

void recv(const te_fl_context& ctx, const te_fl_recv_args& a) {
  const int64_t n = bytes_of(*a.output);
  if (n == 0) return;
  const NcclCall call(ranks_of(a));
  call.check(
      call->recv(bytes(*a.output), to_size(n), kNcclU8, a.peer, call.handle(), stream_of(ctx)),
      "ncclRecv");
}

// One send and one receive per rank, started as an NCCL group. NCCL copies the data that this rank
// sends to itself in parallel with the transfers; a separate copy would run before or after all of
// them.
class Exchange {
 public:
  Exchange(const te_fl_context& ctx, const NcclRanks& ranks)
      : stream_(stream_of(ctx)), call_(ranks) {
    call_.group_start();
  }
  void send(int rank, char* from, int64_t n) {
    if (n == 0) return;
    note(call_->send(from, to_size(n), kNcclU8, rank, call_.handle(), stream_), "ncclSend");
  }
  void recv(int rank, char* to, int64_t n) {
    if (n == 0) return;
    note(call_->recv(to, to_size(n), kNcclU8, rank, call_.handle(), stream_), "ncclRecv");
  }
  // Ends the group even after an error. Throws the first error.
  void end() {
    if (status_ == kNcclSuccess) return call_.group_end();
    try {
      call_.group_end();
    } catch (const backend::Error&) {  // caused by the same failure
    }
    call_.check(status_, function_);
  }

 private:
  void note(int status, const char* function) {
    if (status == kNcclSuccess || status_ != kNcclSuccess) return;
    status_ = status;
    function_ = function;
  }

  cudaStream_t stream_;
  NcclCall call_;
  int status_ = kNcclSuccess;
  const char* function_ = "";
};

void all_to_all(const te_fl_context& ctx, const te_fl_all_to_all_args& a) {
  const int64_t n = bytes_of(*a.input) / a.comm->size;
  if (n == 0) return;
  if (of_one_rank(ctx, a)) return;
  Exchange exchange(ctx, ranks_of(a));
  for (int r = 0; r < a.comm->size; ++r) {
    exchange.send(r, bytes(*a.input) + r * n, n);
    exchange.recv(r, bytes(*a.output) + r * n, n);
  }
  exchange.end();
}

void all_to_all_v(const te_fl_context& ctx, const te_fl_all_to_all_v_args& a) {
  const int64_t row = backend::row_bytes(*a.input);
  if (of_one_rank(ctx, a, a.input_rows[0] * row)) return;
  Exchange exchange(ctx, ranks_of(a));
  char *from = bytes(*a.input), *to = bytes(*a.output);
  for (int r = 0; r < a.comm->size; ++r) {
    exchange.send(r, from, a.input_rows[r] * row);
    exchange.recv(r, to, a.output_rows[r] * row);
    from += a.input_rows[r] * row;
    to += a.output_rows[r] * row;
  }
  exchange.end();
}

// Sends and receives the rows of each rank and expert from and to their places, so that no copy
// precedes or follows the transfers. All tensors are in one group.
template <bool kDispatches>
void move_rows(const te_fl_context& ctx, const te_fl_moe_transfer_args& a) {
  const int64_t count = a.input_rows_count, ranks = a.comm->size, experts = count / ranks;
  const auto begins = [&](const int64_t* rows, bool by_rank) {
    return by_rank ? backend::begins_by_rank(rows, count)
                   : backend::begins_by_expert(rows, count, ranks);
  };
  const std::vector<int64_t> from = begins(a.input_rows, kDispatches);
  const std::vector<int64_t> to = begins(a.output_rows, !kDispatches);
  const std::vector<backend::MovedRows> tensors = backend::moved_rows(a);
  if (ranks == 1) {  // the rows keep their order
    const NcclCall call(ranks_of(a));
    for (const backend::MovedRows& t : tensors) {
      check(cudaMemcpyAsync(t.to, t.from, to_size(a.input->dl.shape[0] * t.row_bytes),
                            cudaMemcpyDeviceToDevice, stream_of(ctx)),
            "cudaMemcpyAsync");
    }
    return;
  }
  Exchange exchange(ctx, ranks_of(a));
  for (const backend::MovedRows& t : tensors) {
    for (int64_t i = 0; i < count; ++i) {
      const auto at = to_size(i);
      const int rank = static_cast<int>(i / experts);
      exchange.send(rank, const_cast<char*>(t.from) + from[at] * t.row_bytes,
                    a.input_rows[i] * t.row_bytes);
      exchange.recv(rank, t.to + to[at] * t.row_bytes, a.output_rows[i] * t.row_bytes);
    }
  }
  exchange.end();
}

void check_rows(const te_fl_context& ctx, const te_fl_all_to_all_v_args& a) {
  backend::check_collective(ctx, a);
  const int32_t r = a.comm->rank;
  if (a.input_rows[r] == a.output_rows[r]) return;
  backend::invalid("argument 'output_rows' has " + std::to_string(a.output_rows[r]) + " for rank " +
                   std::to_string(r) + ", this one, and 'input_rows' has " +
                   std::to_string(a.input_rows[r]) + "; what a rank sends itself it receives");
}

size_t barrier_scratch(const te_fl_context&, const te_fl_barrier_args&) { return 1; }

// Implements the barrier as an all-reduce of one byte of scratch, whose value does not matter.
void barrier(const te_fl_context& ctx, const te_fl_barrier_args& a) {
  refuse_in_group("barrier");
  const NcclCall call(ranks_of(a));
  call.check(call->all_reduce(ctx.workspace, ctx.workspace, 1, kNcclU8, kNcclSum, call.handle(),
                              stream_of(ctx)),
             "ncclAllReduce");
}

// ---- descriptors

template <class Args>
std::string words(const Args& a, const char* functions) {
  const Nccl* n = nccl();
  if (n == nullptr) return std::string(nccl_missing());
  if (a.comm->size == 1) {
    if constexpr (requires { a.input, a.output; }) functions = "a copy, since there is one rank";
    if constexpr (requires { a.data; }) functions = "nothing to do, since there is one rank";
  }
  return "NCCL " + n->version_text + ": " + functions;
}
template <const char* kFunctions, class Args>
std::string describe_choice(const te_fl_context&, const Args& a) {
  return words(a, kFunctions);
}
template <const char* kFunctions, class Args>
std::string reduction_words(const te_fl_context&, const Args& a) {
  const char* between = takes_integers(a)
                            ? " of integers that order as the values do, NaN last, between two "
                              "kernels of the plugin's own"
                            : "";
  return words(a, (std::string(kFunctions) + between).c_str());
}

constexpr char kAllReduce[] = "ncclAllReduce", kReduceScatter[] = "ncclReduceScatter",
               kAllGather[] = "ncclAllGather", kBroadcast[] = "ncclBroadcast", kSend[] = "ncclSend",
               kRecv[] = "ncclRecv",
               kExchange[] = "ncclSend and ncclRecv for each rank, in one group",
               kExperts[] = "ncclSend and ncclRecv for each expert and rank, in one group",
               kBarrier[] = "ncclAllReduce of one byte";

template <class Args, auto F, auto Checks, auto Describes>
te_fl_op_desc collective(const char* name) {
  te_fl_op_desc op = descriptor<Args, F>(name);
  op.impl_id = "vendor.nccl";
  op.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
  op.supports = backend::supports_thunk<Args, Checks>;
  op.describe = backend::describe_thunk<Args, Describes>;
  return op;
}
template <class Args, auto F, const char* kFunctions, auto Checks = backend::check_collective<Args>>
te_fl_op_desc copying(const char* name) {
  return collective<Args, F, Checks, describe_choice<kFunctions, Args>>(name);
}
template <class Args, auto F, const char* kFunctions>
te_fl_op_desc reducing(const char* name) {
  te_fl_op_desc op =
      collective<Args, F, check_reduction<Args>, reduction_words<kFunctions, Args>>(name);
  op.workspace = backend::workspace_thunk<Args, reduction_scratch<Args>>;
  return op;
}

}  // namespace

void append_collectives(std::vector<te_fl_op_desc>& ops) {
  ops.push_back(reducing<te_fl_all_reduce_args, all_reduce, kAllReduce>("all_reduce"));
  ops.push_back(
      reducing<te_fl_reduce_scatter_args, reduce_scatter, kReduceScatter>("reduce_scatter"));
  ops.push_back(copying<te_fl_all_gather_args, all_gather, kAllGather>("all_gather"));
  ops.push_back(copying<te_fl_all_to_all_args, all_to_all, kExchange>("all_to_all"));
  ops.push_back(
      copying<te_fl_all_to_all_v_args, all_to_all_v, kExchange, check_rows>("all_to_all_v"));
  ops.push_back(copying<te_fl_moe_dispatch_args, move_rows<true>, kExperts>("moe_dispatch"));
  ops.push_back(copying<te_fl_moe_combine_args, move_rows<false>, kExperts>("moe_combine"));
  ops.push_back(copying<te_fl_broadcast_args, broadcast, kBroadcast>("broadcast"));
  ops.push_back(copying<te_fl_send_args, send, kSend>("send"));
  ops.push_back(copying<te_fl_recv_args, recv, kRecv>("recv"));
  ops.push_back(copying<te_fl_barrier_args, barrier, kBarrier>("barrier"));
  ops.back().workspace = backend::workspace_thunk<te_fl_barrier_args, barrier_scratch>;
}

}  // namespace te_fl::cuda
