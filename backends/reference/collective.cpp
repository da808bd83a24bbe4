// Collectives between ranks that are threads of one process. Reductions are computed in double, in
// the order of the ranks.
#include "te_fl/ops/collective.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "dispatch.hpp"
#include "element.hpp"
#include "families.hpp"
#include "meeting.hpp"
#include "te_fl/backend/collective.hpp"
#include "te_fl/ops/moe.h"
#include "thread_ranks.hpp"

namespace te_fl::reference {

namespace {

constexpr const char* kReductions[] = {"sum", "max", "avg"};

// ---- reductions

// Calls f with the element type and the accumulation type. Integers are reduced exactly; their sums
// wrap around.
template <class F>
void visit_reduced(int dtype, F&& f) {
  if (dtype == TE_FL_I32) return f(std::type_identity<int32_t>{}, std::type_identity<int64_t>{});
  if (dtype == TE_FL_I64) return f(std::type_identity<int64_t>{}, std::type_identity<int64_t>{});
  visit_float(dtype, [&](auto type) { f(type, std::type_identity<double>{}); });
}

template <class T, class Wide>
Wide widen(T value) {
  if constexpr (std::is_integral_v<Wide>) {
    return value;
  } else {
    return numeric::to_double(value);
  }
}
template <class T, class Wide>
T narrow(Wide value) {
  if constexpr (std::is_integral_v<Wide>) {
    return static_cast<T>(value);
  } else {
    return numeric::from_double<T>(value);
  }
}

template <class Wide>
Wide joined(int32_t reduction, Wide a, Wide b) {
  if (reduction == TE_FL_REDUCTION_MAX) return a != a || a >= b ? a : b;  // NaN is kept
  if constexpr (std::is_integral_v<Wide>) {
    return static_cast<Wide>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

// Reduces elements [begin, begin + n) over all ranks' inputs.
template <class T, class Wide>
void reduce(Ranks ranks, int64_t begin, int64_t n, T* out) {
  const int32_t reduction = ranks[0]->reduction;
  for (int64_t i = 0; i < n; ++i) {
    Wide value = widen<T, Wide>(load<T>(ranks[0]->in, begin + i));
    for (size_t r = 1; r < ranks.size(); ++r) {
      value = joined(reduction, value, widen<T, Wide>(load<T>(ranks[r]->in, begin + i)));
    }
    if (reduction == TE_FL_REDUCTION_AVG) value /= static_cast<Wide>(ranks.size());
    out[i] = narrow<T>(value);
  }
}

// Reduces all elements in ascending pieces and calls write(begin, n, values) for each. After that
// call, no input element before begin + n is read, so write() may overwrite those.
template <class Write>
void reduce_all(Ranks ranks, Write&& write) {
  visit_reduced(ranks[0]->dtype, [&](auto type, auto wide) {
    using T = typename decltype(type)::type;
    if constexpr (!is_fp4<T>) {
      T values[512];
      for (int64_t begin = 0; begin < ranks[0]->elements;) {
        const int64_t n = std::min<int64_t>(std::size(values), ranks[0]->elements - begin);
        reduce<T, typename decltype(wide)::type>(ranks, begin, n, values);
        write(begin, n, values);
        begin += n;
      }
    }
  });
}

void all_reduce(Ranks ranks) {
  reduce_all(ranks, [&]<class T>(int64_t begin, int64_t n, const T* values) {
    for (const Brought* rank : ranks) {
      std::memcpy(reinterpret_cast<T*>(rank->out) + begin, values,
                  static_cast<size_t>(n) * sizeof(T));
    }
  });
}

void reduce_scatter(Ranks ranks) {
  const int64_t part = ranks[0]->elements / static_cast<int64_t>(ranks.size());
  reduce_all(ranks, [&]<class T>(int64_t begin, int64_t n, const T* values) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t element = begin + i;
      reinterpret_cast<T*>(ranks[static_cast<size_t>(element / part)]->out)[element % part] =
          values[i];
    }
  });
}

// ---- copies

void copy(char* to, const char* from, int64_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

void all_gather(Ranks ranks) {
  for (const Brought* to : ranks) {
    char* part = to->out;
    for (const Brought* from : ranks) {
      copy(part, from->in, from->bytes);
      part += from->bytes;
    }
  }
}

void all_to_all(Ranks ranks) {
  const int64_t bytes = ranks[0]->bytes / static_cast<int64_t>(ranks.size());
  for (size_t to = 0; to < ranks.size(); ++to) {
    for (size_t from = 0; from < ranks.size(); ++from) {
      copy(ranks[to]->out + static_cast<int64_t>(from) * bytes,
           ranks[from]->in + static_cast<int64_t>(to) * bytes, bytes);
    }
  }
}

void all_to_all_v(Ranks ranks) {
  std::vector<const char*> next;
  for (const Brought* rank : ranks) next.push_back(rank->in);
  for (size_t to = 0; to < ranks.size(); ++to) {
    char* part = ranks[to]->out;
    for (size_t from = 0; from < ranks.size(); ++from) {
      const int64_t bytes = ranks[from]->to[to] * ranks[from]->row_bytes;
      copy(part, next[from], bytes);
      part += bytes;
      next[from] += bytes;
    }
  }
}

// Moves the rows of each pair of ranks and each expert to their places.
void move_experts_rows(Ranks ranks) {
  const size_t experts = ranks[0]->to.size() / ranks.size();
  for (size_t to = 0; to < ranks.size(); ++to) {
    for (size_t from = 0; from < ranks.size(); ++from) {
      for (size_t e = 0; e < experts; ++e) {
        const Brought &sender = *ranks[from], &receiver = *ranks[to];
        const size_t sent = to * experts + e, received = from * experts + e;
        for (size_t t = 0; t < sender.moved.size(); ++t) {
          const int64_t bytes = sender.moved[t].row_bytes;
          copy(receiver.moved[t].to + receiver.from_begins[received] * bytes,
               sender.moved[t].from + sender.to_begins[sent] * bytes, sender.to[sent] * bytes);
        }
      }
    }
  }
}

void broadcast(Ranks ranks) {
  const Brought& root = *ranks[static_cast<size_t>(ranks[0]->root)];
  for (const Brought* rank : ranks) copy(rank->out, root.out, root.bytes);
}

// Returns an error text if a rank expects a number of rows that differs from what the other rank
// sends; empty if all match.
std::string rows_differ(Ranks ranks) {
  const auto text = [](int64_t n) { return std::to_string(n); };
  for (size_t from = 0; from < ranks.size(); ++from) {
    const Brought& b = *ranks[from];
    if (b.row_bytes != ranks[0]->row_bytes) {
      return "a row of all_to_all_v is of " + text(b.row_bytes) + " bytes on rank " +
             std::to_string(from) + " and of " + text(ranks[0]->row_bytes) + " on rank 0";
    }
    for (size_t to = 0; to < ranks.size(); ++to) {
      const int64_t awaited = ranks[to]->from[from];
      if (b.to[to] == awaited) continue;
      return "rank " + std::to_string(from) + " has " + text(b.to[to]) + " rows for rank " +
             std::to_string(to) + ", which waits for " + text(awaited) + " of them in all_to_all_v";
    }
  }
  return "";
}

// Compares the rows of experts likewise. Numbers of rows and bytes are compared by rank and expert.
std::string experts_rows_differ(Ranks ranks) {
  const auto text = [](size_t n) { return std::to_string(n); };
  const Brought& first = *ranks[0];
  for (size_t r = 1; r < ranks.size(); ++r) {
    const Brought& b = *ranks[r];
    const std::string which = std::string(b.op->name) + " has on rank " + text(r) + " ";
    if (b.to.size() != first.to.size()) {
      return which + text(b.to.size()) + " experts, and on rank 0 " + text(first.to.size());
    }
    if (b.moved.size() != first.moved.size()) {
      return which + text(b.moved.size()) + " tensors, and on rank 0 " + text(first.moved.size());
    }
    for (size_t t = 0; t < b.moved.size(); ++t) {
      if (b.moved[t].row_bytes == first.moved[t].row_bytes) continue;
      return which + "rows of " + std::to_string(b.moved[t].row_bytes) + " bytes, and on rank 0 " +
             std::to_string(first.moved[t].row_bytes);
    }
  }
  const size_t experts = first.to.size() / ranks.size();
  for (size_t from = 0; from < ranks.size(); ++from) {
    for (size_t i = 0; i < first.to.size(); ++i) {
      const size_t to = i / experts, e = i % experts;
      const int64_t sent = ranks[from]->to[i], awaited = ranks[to]->from[from * experts + e];
      if (sent == awaited) continue;
      return "rank " + text(from) + " has " + std::to_string(sent) + " rows for rank " + text(to) +
             " and its expert " + text(e) + ", which waits for " + std::to_string(awaited) +
             " of them in " + first.op->name;
    }
  }
  return "";
}

// ---- the ops

constexpr Collective kAllReduce{.name = "all_reduce", .compute = all_reduce};
constexpr Collective kAllGather{.name = "all_gather", .compute = all_gather};
constexpr Collective kReduceScatter{.name = "reduce_scatter", .compute = reduce_scatter};
constexpr Collective kAllToAll{.name = "all_to_all", .compute = all_to_all};
constexpr Collective kAllToAllV{
    .name = "all_to_all_v", .compute = all_to_all_v, .misfit = rows_differ};
constexpr Collective kMoeDispatch{
    .name = "moe_dispatch", .compute = move_experts_rows, .misfit = experts_rows_differ};
constexpr Collective kMoeCombine{
    .name = "moe_combine", .compute = move_experts_rows, .misfit = experts_rows_differ};
constexpr Collective kBroadcast{.name = "broadcast", .compute = broadcast};
constexpr Collective kSend{.name = "send", .way = Collective::Way::kSend};
constexpr Collective kReceive{.name = "recv", .way = Collective::Way::kReceive};
constexpr Collective kBarrier{.name = "barrier"};

template <class Args, const Collective& op>
Brought brought(const Args& a) {
  Brought b;
  b.op = &op;
  const auto size_of = [&](const te_fl_tensor& t) {
    b.elements = backend::numel(t);
    b.dtype = dtype_of(t);
    b.bytes = backend::bytes_of(t);
  };
  if constexpr (requires { a.output; }) size_of(*a.output), b.out = backend::data<char>(*a.output);
  if constexpr (requires { a.data; }) size_of(*a.data), b.out = backend::data<char>(*a.data);
  if constexpr (requires { a.input; })
    size_of(*a.input), b.in = backend::data<const char>(*a.input);
  if constexpr (requires { a.reduction; }) b.reduction = a.reduction;
  if constexpr (requires { a.root; }) b.root = a.root;
  if constexpr (requires { a.peer; }) b.peer = a.peer;
  if constexpr (std::is_same_v<Args, te_fl_moe_transfer_args>) {
    const int64_t count = a.input_rows_count, ranks = a.comm->size;
    const bool dispatches = &op == &kMoeDispatch;
    b.moved = backend::moved_rows(a);
    b.to.assign(a.input_rows, a.input_rows + count);
    b.from.assign(a.output_rows, a.output_rows + count);
    b.to_begins = dispatches ? backend::begins_by_rank(a.input_rows, count)
                             : backend::begins_by_expert(a.input_rows, count, ranks);
    b.from_begins = dispatches ? backend::begins_by_expert(a.output_rows, count, ranks)
                               : backend::begins_by_rank(a.output_rows, count);
  } else if constexpr (requires { a.input_rows; }) {
    b.row_bytes = backend::row_bytes(*a.input);
    b.to.assign(a.input_rows, a.input_rows + a.input_rows_count);
    b.from.assign(a.output_rows, a.output_rows + a.output_rows_count);
  }
  return b;
}

template <class Args, const Collective& op>
void run(const te_fl_context&, const Args& args) {
  call(backend::communicator<ThreadRank>(args.comm), brought<Args, op>(args));
}

template <class Args, const Collective& op>
void append(std::vector<te_fl_op_desc>& ops) {
  te_fl_op_desc desc = descriptor<Args, run<Args, op>>(op.name);
  desc.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
  desc.supports = backend::supports_thunk<Args, backend::check_collective<Args>>;
  ops.push_back(desc);
}

}  // namespace

std::string describe(const Brought& b) {
  std::string text = b.op->name;
  if (b.dtype < 0) return text;
  text += " of " + std::to_string(b.elements) + " " + dtype_name(b.dtype);
  if (b.reduction >= 0) text += std::string(" (") + kReductions[b.reduction] + ")";
  if (b.root >= 0) text += " from rank " + std::to_string(b.root);
  const bool sends = b.op->way == Collective::Way::kSend;
  if (b.peer >= 0) text += (sends ? " to rank " : " from rank ") + std::to_string(b.peer);
  return text;
}

void append_collective(std::vector<te_fl_op_desc>& ops) {
  append<te_fl_all_reduce_args, kAllReduce>(ops);
  append<te_fl_all_gather_args, kAllGather>(ops);
  append<te_fl_reduce_scatter_args, kReduceScatter>(ops);
  append<te_fl_all_to_all_args, kAllToAll>(ops);
  append<te_fl_all_to_all_v_args, kAllToAllV>(ops);
  append<te_fl_moe_dispatch_args, kMoeDispatch>(ops);
  append<te_fl_moe_combine_args, kMoeCombine>(ops);
  append<te_fl_broadcast_args, kBroadcast>(ops);
  append<te_fl_send_args, kSend>(ops);
  append<te_fl_recv_args, kReceive>(ops);
  append<te_fl_barrier_args, kBarrier>(ops);
}

}  // namespace te_fl::reference
