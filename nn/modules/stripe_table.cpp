#include "nn/modules/stripe_table.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/file.hpp"
#include "core/base/text.hpp"
#include "te_fl/environment.hpp"

namespace te_fl::nn {
namespace detail {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMostBytes = uint64_t{16} << 20;
constexpr std::string_view kName = "TE_FL_STRIPES_FILE";

// The names of operand formats in the file, and the divisor of a stripe's features: FP8 products
// need rows of 16 bytes, and scale blocks cover 128 rows of the weight.
struct Operands {
  std::string_view name;
  int64_t multiple;
};
constexpr std::array<Operands, 5> kOperands = {
    {{"f32", 1}, {"bf16", 1}, {"f16", 1}, {"fp8", 16}, {"fp8_block", 128}}};
constexpr std::array<std::string_view, 3> kOutputs = {"f32", "bf16", "f16"};

struct Entry {
  std::string device, operands, output;
  int64_t ranks = 0, rows = 0, in = 0, out = 0, stripes = 1;

  bool same_product(const Entry& o) const {
    return device == o.device && operands == o.operands && output == o.output && ranks == o.ranks &&
           rows == o.rows && in == o.in && out == o.out;
  }
};

Result<std::string> text_field(const Json& object, const char* key, const std::string& where) {
  const auto at = object.find(key);
  if (at == object.end() || !at->is_string()) {
    return invalid_argument(where + " needs the string \"" + key + "\"");
  }
  return at->get<std::string>();
}

Result<int64_t> size_field(const Json& object, const char* key, const std::string& where) {
  const auto at = object.find(key);
  if (at == object.end() || !at->is_number_integer() || *at < 1 || *at > INT32_MAX) {
    return invalid_argument(where + " needs the whole number \"" + key + "\", from 1 to " +
                            std::to_string(INT32_MAX));
  }
  return at->get<int64_t>();
}

Status check_keys(const Json& object, const std::vector<std::string>& known,
                  const std::string& where) {
  if (!object.is_object()) return invalid_argument(where + " must be an object {...}");
  for (const auto& [key, value] : object.items()) {
    if (std::ranges::find(known, key) != known.end()) continue;
    return invalid_argument(where + " has the unknown key \"" + key + "\"" +
                            core::did_you_mean(key, known));
  }
  return {};
}

template <class List>
Status check_one_of(const std::string& word, const List& words, const char* key,
                    const std::string& where) {
  std::string all;
  for (const auto& one : words) {
    if (one == word) return {};
    all += (all.empty() ? "" : ", ") + std::string(one);
  }
  return invalid_argument(where + "." + key + " is \"" + word + "\"; it must be one of " + all);
}

Status check_divides(int64_t value, int64_t by, const std::string& what, const std::string& where) {
  if (value % by == 0) return {};
  return invalid_argument(where + ": " + what + " is " + std::to_string(value) +
                          ", which must be a multiple of " + std::to_string(by));
}

Status check_entry(const Entry& e, const std::string& where) {
  std::array<std::string_view, kOperands.size()> names;
  std::ranges::transform(kOperands, names.begin(), &Operands::name);
  TE_FL_RETURN_IF_ERROR(check_one_of(e.operands, names, "operands", where));
  TE_FL_RETURN_IF_ERROR(check_one_of(e.output, kOutputs, "output", where));
  TE_FL_RETURN_IF_ERROR(check_divides(e.rows, e.ranks, "rows", where));
  TE_FL_RETURN_IF_ERROR(check_divides(e.out, e.stripes, "out", where));
  if (e.stripes == 1) return {};
  const auto* operands = std::ranges::find(kOperands, e.operands, &Operands::name);
  return check_divides(e.out / e.stripes, operands->multiple,
                       "out / stripes with operands " + e.operands, where);
}

Result<Entry> entry_of(const Json& object, const std::string& where) {
  TE_FL_RETURN_IF_ERROR(check_keys(object,
                                   {"device", "ranks", "operands", "output", "rows", "in", "out",
                                    "stripes", "us", "us_of_one", "note"},
                                   where));
  Entry e;
  TE_FL_ASSIGN_OR_RETURN(e.device, text_field(object, "device", where));
  TE_FL_ASSIGN_OR_RETURN(e.operands, text_field(object, "operands", where));
  TE_FL_ASSIGN_OR_RETURN(e.output, text_field(object, "output", where));
  TE_FL_ASSIGN_OR_RETURN(e.ranks, size_field(object, "ranks", where));
  TE_FL_ASSIGN_OR_RETURN(e.rows, size_field(object, "rows", where));
  TE_FL_ASSIGN_OR_RETURN(e.in, size_field(object, "in", where));
  TE_FL_ASSIGN_OR_RETURN(e.out, size_field(object, "out", where));
  TE_FL_ASSIGN_OR_RETURN(e.stripes, size_field(object, "stripes", where));
  TE_FL_RETURN_IF_ERROR(check_entry(e, where));
  return e;
}

Result<std::vector<Entry>> parse(const std::string& text) {
  const Json file = Json::parse(text, nullptr, false);
  if (file.is_discarded()) return invalid_argument("it is not JSON");
  TE_FL_RETURN_IF_ERROR(check_keys(file, {"te_fl_stripes", "entries", "note"}, "the file"));
  if (!file.contains("te_fl_stripes") || file["te_fl_stripes"] != 1) {
    return invalid_argument("the file must say \"te_fl_stripes\": 1");
  }
  if (!file.contains("entries") || !file["entries"].is_array()) {
    return invalid_argument("the file needs the list \"entries\"");
  }
  std::vector<Entry> entries;
  for (const Json& object : file["entries"]) {
    const std::string where = "entries[" + std::to_string(entries.size()) + "]";
    TE_FL_ASSIGN_OR_RETURN(Entry entry, entry_of(object, where));
    const auto same = [&](const Entry& other) { return entry.same_product(other); };
    if (std::ranges::any_of(entries, same)) {
      return invalid_argument(where + " is of the same product as an earlier one; leave one out");
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

struct Table {
  Status status;  // an error if the file is invalid
  std::string hash;
  std::vector<Entry> entries;
};

std::shared_ptr<const Table> read(const std::string& path) {
  auto table = std::make_shared<Table>();
  Result<std::string> text = core::read_file(path, kMostBytes);
  if (!text.ok()) {
    table->status = text.status().wrap(std::string(kName) + ": the file " + path);
    return table;
  }
  table->hash = core::contents_hash(*text);
  Result<std::vector<Entry>> entries = parse(*text);
  if (entries.ok()) {
    table->entries = *std::move(entries);
  } else {
    table->status = entries.status().wrap(std::string(kName) + ": " + path);
  }
  return table;
}

// The table for the settings of one environment generation.
struct Seen {
  uint64_t generation = 0;
  std::string path;                    // empty: no file
  std::shared_ptr<const Table> table;  // null: no file
};

// Never destroyed, like device_names below: threads may run after static destruction.
std::atomic<std::shared_ptr<const Seen>>& last_seen = *new std::atomic<std::shared_ptr<const Seen>>;
std::atomic<uint64_t> without_file{0};  // a generation without a file

// The current table; null if there is no file.
std::shared_ptr<const Table> current() {
  const uint64_t generation = environment::generation();
  if (generation != 0 && without_file.load(std::memory_order_acquire) == generation) return nullptr;
  const std::shared_ptr<const Seen> before = last_seen.load();
  if (before != nullptr && before->generation == generation) return before->table;
  auto seen = std::make_shared<Seen>();
  seen->path = environment::get_if_set(kName).value_or("");
  seen->generation = environment::generation();
  if (seen->path.empty()) {
    without_file.store(seen->generation, std::memory_order_release);
    return nullptr;
  }
  const bool same = before != nullptr && before->path == seen->path && before->table->status.ok();
  seen->table = same ? before->table : read(seen->path);
  last_seen.store(seen);
  return seen->table;
}

// Caches device names, since asking the driver is too slow for every call. Two threads may ask for
// the same name. Not thread_local, since two copies of the library in one process have too little
// static TLS for it.
using Names = std::vector<std::pair<Device, std::string>>;
std::atomic<std::shared_ptr<const Names>>& device_names =
    *new std::atomic<std::shared_ptr<const Names>>;
Result<std::string> name_of(const Device& device) {
  const std::shared_ptr<const Names> known = device_names.load();
  if (known != nullptr) {
    const auto at = std::ranges::find(*known, device, &Names::value_type::first);
    if (at != known->end()) return at->second;
  }
  TE_FL_ASSIGN_OR_RETURN(const te_fl_device_props properties, devices::properties(device));
  auto more = std::make_shared<Names>(known != nullptr ? *known : Names());
  std::string name = more->emplace_back(device, properties.name).second;
  device_names.store(std::move(more));
  return name;
}

std::string operands_of(const Tensor& input) {
  if (!input.quantized()) return std::string(name(input.dtype()));
  return input.scaling() == Scaling::kTensor ? "fp8" : "fp8_block";
}

}  // namespace

Result<int> stripes_of(const SummedProduct& product) {
  const std::shared_ptr<const Table> table = current();
  if (table == nullptr) return 1;
  TE_FL_RETURN_IF_ERROR(table->status);
  TE_FL_ASSIGN_OR_RETURN(std::string device, name_of(product.input.device()));
  const Entry wanted{.device = std::move(device),
                     .operands = operands_of(product.input),
                     .output = std::string(name(product.output)),
                     .ranks = product.ranks,
                     .rows = product.input.size(0),
                     .in = product.input.size(1),
                     .out = product.out};
  const auto same = [&](const Entry& entry) { return entry.same_product(wanted); };
  const auto at = std::ranges::find_if(table->entries, same);
  return at == table->entries.end() ? 1 : static_cast<int>(at->stripes);
}

}  // namespace detail

Result<std::string> stripes_in_words() {
  const auto table = detail::current();
  if (table == nullptr) return std::string("no file");
  TE_FL_RETURN_IF_ERROR(table->status);
  return "a file of contents " + table->hash;
}

}  // namespace te_fl::nn
