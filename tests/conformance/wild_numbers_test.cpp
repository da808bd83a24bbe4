// Extreme values for every integer that a caller passes: arguments, list elements, extents, ranks,
// strides, dtype codes, and the contents of integer tensors. The test takes the calls of the
// conformance table and changes one number at a time, so it covers each new op of the catalogue.
// Each changed call must be refused with an error, or all implementations must give the same
// results.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "conformance/case.hpp"
#include "conformance/device_mirror.hpp"
#include "conformance/format.hpp"
#include "conformance/ranks.hpp"
#include "support/sanitizers.hpp"
#include "te_fl/te_fl.hpp"

namespace te_fl::conformance {
namespace {

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost32 = std::numeric_limits<int32_t>::max();
constexpr int64_t k32 = int64_t{1} << 32, k40 = int64_t{1} << 40;
constexpr std::array<int64_t, 14> kWild = {kLeast,  -kMost32 - 1,  -1,        0,    1,
                                           3,       kMost32 - 1,   kMost32,   k32,  k32 + 1,
                                           k40 + 1, kMost / 2 + 1, kMost - 1, kMost};

// Limits the process's address space during its lifetime, so that a huge allocation fails and the
// call that makes it is found. Sanitizers reserve more address space and refuse huge requests
// themselves.
class LittleMemory {
 public:
  LittleMemory() {
    if (TE_FL_ASAN || TE_FL_TSAN) return;
    getrlimit(RLIMIT_AS, &before_);
    uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit now = before_;
    now.rlim_cur = std::min<rlim_t>(before_.rlim_max, pages * 4096 + (rlim_t{512} << 20));
    setrlimit(RLIMIT_AS, &now);
  }
  LittleMemory(const LittleMemory&) = delete;
  LittleMemory& operator=(const LittleMemory&) = delete;
  ~LittleMemory() {
    if (!(TE_FL_ASAN || TE_FL_TSAN)) setrlimit(RLIMIT_AS, &before_);
  }

 private:
  rlimit before_{};
};

// A tensor of a call whose numbers the test may change.
struct Changeable {
  std::string name;
  const Tensor* from = nullptr;
  bool writes = false;
  te_fl_tensor t{}, first{};
  te_fl_quant quant{}, first_quant{};
  std::array<int64_t, 8> shape{}, strides{};

  int rank() const { return static_cast<int>(from->shape.size()); }
  void restore() {
    t = first;
    quant = first_quant;
    t.dl.shape = shape.data();
    std::copy(from->shape.begin(), from->shape.end(), shape.begin());
    if (!from->strides.empty()) {
      std::copy(from->strides.begin(), from->strides.end(), strides.begin());
      t.dl.strides = strides.data();
    }
    if (t.quant != nullptr) t.quant = &quant;
  }
};

// A case's call whose tensors are followed by guard pages.
class WildCall {
 public:
  WildCall(const Case& c, const te_fl_op_schema& op, const te_fl_communicator* comm)
      : schema(op), problem(c.op, c.seed), mirror_({}, nullptr, 1), args_(op.args_size / 8 + 1) {
    problem.ranks = c.ranks;
    c.build(problem);
    if (!mirror_.upload(problem.tensors).ok()) throw std::runtime_error("no guarded memory");
    put<uint32_t>(0, schema.args_size);
    for (uint32_t i = 0; i < schema.arg_count; ++i) fill(*schema.args[i], comm);
    for (const auto& t : problem.tensors) remember(*t);
    first_args_ = args_;
    first_integers_ = integers;
    restore();
  }
  WildCall(const WildCall&) = delete;
  WildCall& operator=(const WildCall&) = delete;

  const void* args() const { return args_.data(); }
  template <class T>
  void put(size_t offset, T value) {
    std::memcpy(reinterpret_cast<char*>(args_.data()) + offset, &value, sizeof value);
  }
  void restore() {
    args_ = first_args_;
    for (auto& [name, list] : integers)
      std::copy(first_integers_.at(name).begin(), first_integers_.at(name).end(), list.begin());
    for (Changeable& t : tensors) t.restore();
    for (const auto& [data, bytes] : memory_) std::memcpy(data, bytes.data(), bytes.size());
    options = {};
    options.rng.seed = problem.rng.seed, options.rng.offset = problem.rng.offset;
  }
  Status run(const std::string& impl) {
    PolicySettings settings;
    settings.strict = true;
    settings.per_op[problem.op_name] = {
        PolicyToken{PolicyToken::Type::kImpl, Kind::kDefault, impl}};
    const PolicyScope scope(SelectionPolicy::intern(settings));
    OpManager& manager = OpManager::instance();
    return manager.call(*OpRegistry::instance().find(problem.op_name), args(), options);
  }
  // Returns the values of each plain output, with the case's original extents.
  std::vector<std::vector<double>> results() const {
    std::vector<std::vector<double>> all;
    for (const Changeable& t : tensors) {
      auto& values = all.emplace_back();
      const int dtype = t.from->spec.dtype;
      if (!t.writes || t.first.dl.data == nullptr || t.from->spec.quantised()) continue;
      if (storage_bits(dtype) < 16 && dtype != TE_FL_U8 && dtype != TE_FL_BOOL) continue;
      for (int64_t i = 0; i < t.from->numel(); ++i) {
        values.push_back(
            load(dtype, static_cast<const uint8_t*>(t.first.dl.data), t.from->index(i)));
      }
    }
    return all;
  }

  const te_fl_op_schema& schema;
  Problem problem;
  std::deque<Changeable> tensors;
  std::map<std::string, std::vector<int64_t>> integers;  // the arguments that are lists of
                                                         // integers, by name
  CallOptions options;

 private:
  const te_fl_tensor* changeable(const te_fl_arg_desc& arg, const Tensor& t) {
    Changeable& copy = tensors.emplace_back();
    copy.name = t.name, copy.from = &t, copy.writes = arg.role != TE_FL_IN;
    copy.first = *mirror_.of(t);
    if (copy.first.quant != nullptr) copy.first_quant = *copy.first.quant;
    return &copy.t;
  }
  void fill(const te_fl_arg_desc& arg, const te_fl_communicator* comm) {
    const auto scalar = problem.scalars.find(arg.name);
    const double value = scalar == problem.scalars.end() ? arg.neutral : scalar->second;
    switch (arg.type) {
      case TE_FL_ARG_TENSOR: {
        const auto t = problem.singles.find(arg.name);
        if (t != problem.singles.end()) put(arg.offset, changeable(arg, *t->second));
        return;
      }
      case TE_FL_ARG_TENSOR_LIST: {
        auto& list = lists_.emplace_back();
        if (const auto found = problem.lists.find(arg.name); found != problem.lists.end())
          for (const Tensor* t : found->second) list.push_back(changeable(arg, *t));
        put(arg.offset, list.empty() ? nullptr : list.data());
        return put(arg.count_offset, static_cast<int64_t>(list.size()));
      }
      case TE_FL_ARG_I64_LIST: {
        std::vector<int64_t>& list = integers[arg.name] = problem.number_lists[arg.name];
        put(arg.offset, list.empty() ? nullptr : list.data());
        return put(arg.count_offset, static_cast<int64_t>(list.size()));
      }
      case TE_FL_ARG_I64:
        return put(arg.offset, static_cast<int64_t>(value));
      case TE_FL_ARG_F32:
        return put(arg.offset, static_cast<float>(value));
      case TE_FL_ARG_F64:
        return put(arg.offset, value);
      case TE_FL_ARG_COMMUNICATOR:
        return put(arg.offset, comm);
      case TE_FL_ARG_SAVED:
        return;
      default:
        return put(arg.offset, static_cast<int32_t>(value));
    }
  }
  void remember(const Tensor& t) {
    const te_fl_tensor& c = *mirror_.of(t);
    const auto add = [&](const std::shared_ptr<Buffer>& buffer, void* data) {
      if (buffer == nullptr || buffer->size() == 0) return;
      auto* bytes = static_cast<uint8_t*>(data);
      memory_.emplace_back(bytes, std::vector<uint8_t>(bytes, bytes + buffer->size()));
    };
    add(t.data, c.dl.data);
    if (c.quant == nullptr) return;
    add(t.col_data, c.quant->columnwise_data);
    add(t.scale_inv, c.quant->scale_inv);
    add(t.col_scale_inv, c.quant->columnwise_scale_inv);
    add(t.amax, c.quant->amax);
    add(t.scale, c.quant->scale);
  }

  DeviceMirror mirror_;
  std::vector<uint64_t> args_, first_args_;
  std::map<std::string, std::vector<int64_t>> first_integers_;
  std::deque<std::vector<const te_fl_tensor*>> lists_;
  std::vector<std::pair<uint8_t*, std::vector<uint8_t>>> memory_;
};

// A change of one number: its description and its function.
struct Change {
  std::string text;
  std::function<void(WildCall&)> apply;
};
using Changes = std::vector<Change>;

// ---- the numbers that are changed

void change_scalar(const te_fl_arg_desc& arg, Changes& all) {
  const bool is64 = arg.type == TE_FL_ARG_I64;
  for (const int64_t w : kWild) {
    if (!is64 && (w < -kMost32 - 1 || w > kMost32)) continue;
    all.push_back({arg.name + (" = " + std::to_string(w)), [&arg, w, is64](WildCall& call) {
                     is64 ? call.put(arg.offset, w) : call.put(arg.offset, static_cast<int32_t>(w));
                   }});
  }
}

void change_count(const te_fl_arg_desc& arg, Changes& all) {
  for (const int64_t w : {kLeast, int64_t{-1}, k32, kMost}) {
    all.push_back({arg.name + ("_count = " + std::to_string(w)),
                   [&arg, w](WildCall& call) { call.put(arg.count_offset, w); }});
  }
}

// The integers of a list or a tensor, independent of their type.
struct Numbers {
  std::string name;
  size_t count;
  int bits;  // negative: unsigned
  std::function<int64_t(WildCall&, size_t)> get;
  std::function<void(WildCall&, size_t, int64_t)> put;
  bool holds(int64_t w) const {
    if (bits == 64) return true;
    if (bits < 0) return w >= 0 && w < int64_t{1} << -bits;
    return w >= -(int64_t{1} << (bits - 1)) && w < int64_t{1} << (bits - 1);
  }
  int64_t most() const { return bits == 64 ? kMost : (int64_t{1} << (std::abs(bits) - 1)) - 1; }
};

// Changes one number of a list, or all from one index on, or several so that their sum wraps around
// to its old value.
void change_numbers(const Numbers& n, Changes& all) {
  const std::set<size_t> places = {0, n.count / 2, n.count - 1};
  for (const int64_t w : kWild) {
    if (!n.holds(w)) continue;
    for (const size_t at : places) {
      const std::string text = n.name + "[" + std::to_string(at) + "] = " + std::to_string(w);
      all.push_back({text, [n, at, w](WildCall& call) { n.put(call, at, w); }});
      if (at + 1 == n.count) continue;
      all.push_back({text + " and so on", [n, at, w](WildCall& call) {
                       for (size_t i = at; i < n.count; ++i) n.put(call, i, w);
                     }});
    }
  }
  if (n.bits < 0) return;
  if (n.count >= 2) {
    all.push_back({n.name + ": -5 before what makes up for it", [n](WildCall& call) {
                     n.put(call, 1, n.get(call, 0) + n.get(call, 1) + 5);
                     n.put(call, 0, -5);
                   }});
  }
  if (n.count < 3) return;
  for (const size_t at : {size_t{0}, n.count - 3}) {
    all.push_back(
        {n.name + ": a sum that wraps from " + std::to_string(at), [n, at](WildCall& call) {
           int64_t sum = 2;
           for (size_t i = at; i < at + 3; ++i) sum += n.get(call, i);
           n.put(call, at, n.most()), n.put(call, at + 1, n.most());
           n.put(call, at + 2, sum);
         }});
  }
}

void change_list(const std::string& name, size_t count, Changes& all) {
  if (count == 0) return;
  change_numbers(
      {name, count, 64, [name](WildCall& call, size_t i) { return call.integers.at(name)[i]; },
       [name](WildCall& call, size_t i, int64_t w) { call.integers.at(name)[i] = w; }},
      all);
}

int integer_bits(int dtype) {
  switch (dtype) {
    case TE_FL_I8:
    case TE_FL_I16:
    case TE_FL_I32:
    case TE_FL_I64:
      return storage_bits(dtype);
    case TE_FL_U8:
    case TE_FL_BOOL:
      return -8;
    default:
      return 0;
  }
}

void change_contents(const Changeable& tensor, size_t k, Changes& all) {
  const Tensor& from = *tensor.from;
  const int bits = integer_bits(from.spec.dtype);
  if (bits == 0 || from.role == Role::kOut || from.numel() == 0 || from.data == nullptr) return;
  const auto width = static_cast<size_t>(std::abs(bits) / 8);
  const auto at = [k, width](WildCall& call, size_t i) {
    const Changeable& t = call.tensors[k];
    return static_cast<uint8_t*>(t.first.dl.data) + t.first.dl.byte_offset +
           (t.from->index(static_cast<int64_t>(i)) - t.from->offset) * static_cast<int64_t>(width);
  };
  change_numbers(
      {tensor.name, static_cast<size_t>(from.numel()), bits,
       [at, width, bits](WildCall& call, size_t i) {
         int64_t value = bits > 0 && (at(call, i)[width - 1] & 0x80) != 0 ? -1 : 0;
         std::memcpy(&value, at(call, i), width);
         return value;
       },
       [at, width](WildCall& call, size_t i, int64_t w) { std::memcpy(at(call, i), &w, width); }},
      all);
}

void change_form(const Changeable& tensor, size_t k, Changes& all) {
  const auto add = [&](const std::string& text, int64_t w, auto f) {
    all.push_back({tensor.name + text + " = " + std::to_string(w),
                   [k, f, w](WildCall& call) { f(call.tensors[k], w); }});
  };
  for (const int64_t w : {-kMost32 - 1, int64_t{-1}, int64_t{9}, kMost32}) {
    add(": ndim", w, [](Changeable& t, int64_t v) { t.t.dl.ndim = static_cast<int32_t>(v); });
    add(": device type", w,
        [](Changeable& t, int64_t v) { t.t.dl.device.type = static_cast<int32_t>(v + 64); });
    add(": dtype", w, [](Changeable& t, int64_t v) {
      t.t.dl.dtype = {static_cast<uint8_t>(v), static_cast<uint8_t>(v + 40),
                      static_cast<uint16_t>(v)};
    });
    if (tensor.first.quant == nullptr) continue;
    add(": scaling", w,
        [](Changeable& t, int64_t v) { t.quant.scaling = static_cast<uint32_t>(v); });
  }
  for (int d = 0; d < tensor.rank(); ++d) {
    const auto dim = static_cast<size_t>(d);
    for (const int64_t w : {kLeast, int64_t{-1}, int64_t{1} << 60, kMost}) {
      add(".shape[" + std::to_string(d) + "]", w,
          [dim](Changeable& t, int64_t v) { t.shape[dim] = v; });
    }
    // Changes only strides of dimensions with extent 1, because no element's address depends on
    // these.
    if (tensor.from->shape[dim] != 1) continue;
    for (const int64_t w : {kLeast, int64_t{-1}, int64_t{0}, kMost}) {
      add(".strides[" + std::to_string(d) + "]", w, [dim](Changeable& t, int64_t v) {
        if (t.t.dl.strides == nullptr) {
          int64_t stride = 1;
          for (auto i = static_cast<size_t>(t.rank()); i-- > 0; stride *= t.shape[i])
            t.strides[i] = stride;
          t.t.dl.strides = t.strides.data();
        }
        t.strides[dim] = v;
      });
    }
  }
}

// Returns true if the changed call may be made. False if a tensor's extents need more memory than
// it has (unless they exceed every address space), or if a tensor has more empty rows than a loop
// can visit.
bool has_its_memory(const WildCall& call) {
  return std::ranges::all_of(call.tensors, [](const Changeable& t) {
    __int128 now = 1, before = 1;
    for (size_t d = 0; d < t.from->shape.size(); ++d) {
      if (now != 0 && t.shape[d] > k32 && t.shape[d] < int64_t{1} << 60) return false;
      now = std::min<__int128>(now * t.shape[d], __int128{1} << 100);
      before *= t.from->shape[d];
    }
    const bool same = std::equal(t.from->shape.begin(), t.from->shape.end(), t.shape.begin());
    return same || now == 0 || (now < before && t.from->strides.empty()) ||
           now >= __int128{1} << 60;
  });
}

// Sets all extents of one value to 0 and all of another value to a huge number, so that the tensors
// stay empty.
void change_extents(const WildCall& call, Changes& all) {
  std::set<int64_t> extents;
  for (const Changeable& t : call.tensors)
    extents.insert(t.from->shape.begin(), t.from->shape.end());
  const auto replace = [](WildCall& c, int64_t from, int64_t to) {
    for (Changeable& t : c.tensors) {
      for (size_t d = 0; d < t.from->shape.size(); ++d)
        if (t.from->shape[d] == from) t.shape[d] = to;
    }
  };
  for (const int64_t none : extents) {
    for (const int64_t huge : extents) {
      for (const int64_t w : {k40, int64_t{1} << 58, int64_t{1} << 60}) {
        all.push_back({"extents of " + std::to_string(none) + " = 0, of " + std::to_string(huge) +
                           " = " + std::to_string(w),
                       [=](WildCall& c) {
                         replace(c, huge, w);
                         replace(c, none, 0);
                       }});
      }
    }
  }
}

void change_random_state(Changes& all) {
  for (const int64_t w : {kLeast, int64_t{-1}, kMost32, k32, kMost}) {
    all.push_back({"rng.offset = " + std::to_string(w),
                   [w](WildCall& call) { call.options.rng.offset = static_cast<uint64_t>(w); }});
  }
}

Changes list_changes(const WildCall& call) {
  Changes all;
  for (uint32_t i = 0; i < call.schema.arg_count; ++i) {
    const te_fl_arg_desc& arg = *call.schema.args[i];
    switch (arg.type) {
      case TE_FL_ARG_BOOL:
      case TE_FL_ARG_ENUM:
      case TE_FL_ARG_I32:
      case TE_FL_ARG_I64:
        change_scalar(arg, all);
        break;
      case TE_FL_ARG_TENSOR_LIST:
        change_count(arg, all);
        break;
      case TE_FL_ARG_I64_LIST:
        change_count(arg, all);
        change_list(arg.name, call.integers.at(arg.name).size(), all);
        break;
      default:
        break;
    }
  }
  for (size_t k = 0; k < std::min<size_t>(call.tensors.size(), 12); ++k) {
    change_contents(call.tensors[k], k, all);
    change_form(call.tensors[k], k, all);
  }
  change_extents(call, all);
  if ((call.schema.flags & TE_FL_SCHEMA_USES_RNG) != 0) change_random_state(all);
  return all;
}

// ---- running the calls

// Returns the kinds of numbers that a case lets the test change: the names of its tensors and
// scalars, NAME of BITS for integer tensors, and NAME of several for tensors and lists of at least
// 3 elements. A case is used if it has an entry that no earlier case has.
std::set<std::string> list_kinds(const WildCall& call) {
  std::set<std::string> kinds;
  for (const Changeable& t : call.tensors) {
    const std::string name = t.name.substr(0, t.name.find('['));
    kinds.insert(name);
    if (const int bits = integer_bits(t.from->spec.dtype); bits != 0)
      kinds.insert(name + " of " + std::to_string(bits));
    if (t.from->numel() >= 3) kinds.insert(name + " of several");
  }
  for (const auto& [name, list] : call.integers)
    if (list.size() >= 3) kinds.insert(name + " of several");
  for (const auto& [name, value] : call.problem.scalars) kinds.insert(name);
  return kinds;
}

bool is_small(const WildCall& call) {
  int64_t elements = 0;
  for (const Changeable& t : call.tensors) elements += t.from->numel();
  return elements < 6000;
}

std::vector<std::string> list_implementations(const std::string& op) {
  std::set<std::string> found;
  for (const OpImplInfo& info : OpRegistry::instance().snapshot())
    if (info.op == op) found.insert(info.impl_id);
  std::vector<std::string> ordered;
  for (const char* id : {"reference.host", "default.cpu"})
    if (found.count(id) != 0) ordered.push_back(id);
  return ordered;
}

bool is_close(const std::vector<double>& a, const std::vector<double>& b, int dtype) {
  if (a.size() != b.size()) return false;
  double largest = 0;
  for (const double x : a) largest = std::isfinite(x) ? std::max(largest, std::fabs(x)) : largest;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    if (integer_bits(dtype) != 0) return false;
    if (!(std::fabs(a[i] - b[i]) <= 0.02 * std::fabs(a[i]) + 0.01 * largest)) return false;
  }
  return true;
}

struct Answer {
  Status status;
  std::vector<std::vector<double>> results;
};

Answer run_call(WildCall& call, const Change* change, const std::string& impl) {
  call.restore();
  if (change != nullptr) change->apply(call);
  Answer answer;
  answer.status = call.run(impl);
  if (answer.status.ok()) answer.results = call.results();
  return answer;
}

// Returns "" if the refusal is proper, otherwise what is wrong with it.
std::string wrong_refusal(const Status& status) {
  if (status.ok()) return {};
  const StatusCode code = status.code();
  const bool refused = code == StatusCode::kInvalidArgument || code == StatusCode::kUnsupported ||
                       code == StatusCode::kNotFound || code == StatusCode::kFailedPrecondition;
  if (!refused || status.message().empty()) return status.to_string();
  return {};
}

// Runs the case's changes on all implementations; returns the number of calls made.
int run_case(const Case& c, WildCall& call, const std::vector<std::string>& impls) {
  std::map<std::string, Answer> plain;
  for (const std::string& impl : impls) plain[impl] = run_call(call, nullptr, impl);
  int calls = 0;
  for (const Change& change : list_changes(call)) {
    call.restore();
    change.apply(call);
    if (!has_its_memory(call)) continue;
    std::optional<Answer> first;
    for (const std::string& impl : impls) {
      if (!plain[impl].status.ok()) continue;  // this implementation does not support the case
      const Answer answer = run_call(call, &change, impl);
      ++calls;
      const std::string where = impl + ", " + c.name + " with " + change.text;
      EXPECT_EQ(wrong_refusal(answer.status), "") << where;
      if (answer.status.code() == StatusCode::kUnsupported) continue;
      if (!first) {
        first = answer;
        continue;
      }
      EXPECT_EQ(answer.status.ok(), first->status.ok())
          << where << ": " << answer.status.to_string() << "\nand " << impls[0] << ": "
          << first->status.to_string();
      if (!answer.status.ok() || !first->status.ok()) continue;
      for (size_t k = 0; k < answer.results.size(); ++k) {
        const int dtype = call.tensors[k].from->spec.dtype;
        if (!is_close(plain[impls[0]].results[k], plain[impl].results[k], dtype)) continue;
        EXPECT_TRUE(is_close(first->results[k], answer.results[k], dtype))
            << where << ": " << call.tensors[k].name << " is not as " << impls[0] << " has it";
      }
    }
  }
  return calls;
}

constexpr int kCasesOfAnOp = 4, kLooked = 40;

// Runs one case of the op for each kind of number (see list_kinds()) that no earlier case has
// covered; returns the number of calls.
int run_op(const std::string& op, const std::vector<const Case*>& cases) {
  const te_fl_op_schema& schema = *OpRegistry::instance().schema(*OpRegistry::instance().find(op));
  const std::vector<std::string> impls = list_implementations(op);
  EXPECT_FALSE(impls.empty()) << op;
  if (impls.empty()) return 0;
  std::optional<te_fl::Result<Ranks>> ranks;
  const te_fl_communicator* comm = nullptr;
  if ((schema.flags & TE_FL_SCHEMA_COLLECTIVE) != 0) {
    ranks.emplace(Ranks::create(op, impls[0], Device(), 1));
    EXPECT_TRUE(ranks->ok()) << ranks->status().to_string();
    if (!ranks->ok()) return 0;
    comm = (**ranks)[0].c();
  }
  std::set<std::string> known;
  int taken = 0, calls = 0;
  const size_t step = std::max<size_t>(1, cases.size() / kLooked);
  for (size_t i = 0; i < cases.size() && taken < kCasesOfAnOp; i += step) {
    WildCall call(*cases[i], schema, comm);
    if (call.problem.want_code != 0 || call.problem.saved_storage >= 0 || !is_small(call)) continue;
    const size_t before = known.size();
    known.merge(list_kinds(call));
    if (known.size() == before) continue;
    ++taken;
    calls += run_case(*cases[i], call, impls);
  }
  const bool has_numbers = schema.arg_count > 1 || comm == nullptr;
  EXPECT_TRUE(calls > 0 || !has_numbers) << op;
  return calls;
}

TEST(WildNumbers, AreRefusedOrRunAlike) {
  const Table table = all_cases();
  std::map<std::string, std::vector<const Case*>> by_op;
  for (const Case& c : table)
    if (!c.large && c.ranks <= 1) by_op[c.op].push_back(&c);
  OpRegistry& registry = OpManager::instance().registry();  // has the built-in backends
  for (const std::string& op : registry.op_names()) {
    const bool collective =
        (registry.schema(*registry.find(op))->flags & TE_FL_SCHEMA_COLLECTIVE) != 0;
    EXPECT_TRUE(collective || by_op.count(op) != 0) << op << " has no case";
  }
  const LittleMemory limit;
  for (const auto& [op, cases] : by_op) run_op(op, cases);
}

}  // namespace
}  // namespace te_fl::conformance
