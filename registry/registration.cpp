#include "registry/registration.hpp"

#include <algorithm>
#include <mutex>
#include <unordered_set>

#include "core/base/abi_struct.hpp"
#include "core/base/fork.hpp"
#include "core/base/text.hpp"
#include "registry/in_place.hpp"
#include "registry/plan_cache.hpp"
#include "registry/thread_record.hpp"

namespace te_fl::registry {
namespace {

constinit core::ForkMutex strings_mutex(core::LockLevel::kInternedStrings);
const core::ForkMutex::Registration strings_registration(strings_mutex);

std::atomic<uint64_t> g_numbers{1};

using CompiledPtr = std::shared_ptr<const core::CompiledOp>;

// The compiled ops of the catalogue, shared by all registries.
const std::vector<CompiledPtr>& compiled_catalogue() {
  static constinit std::atomic<const std::vector<CompiledPtr>*> all{nullptr};
  return core::made_once(all, [] {
    auto* made = new std::vector<CompiledPtr>;
    for (const te_fl_op_schema* schema : core::catalogue()) {
      auto compiled = core::CompiledOp::compile(*schema);
      if (!compiled.ok())
        die(compiled.status().wrap(std::string("the catalogue's op ") + schema->name));
      made->push_back(std::move(compiled).value());
    }
    return made;
  });
}

std::shared_ptr<OpRow> make_row(CompiledPtr compiled) {
  auto row = std::make_shared<OpRow>();
  const te_fl_op_schema& schema = compiled->schema();
  for (uint32_t i = 0; i < schema.arg_count; ++i) {
    if (schema.args[i]->type == TE_FL_ARG_SAVED) row->saved = schema.args[i];
  }
  row->compiled = std::move(compiled);
  return row;
}

void put_row(Table& table, NameMap& names, uint32_t id, CompiledPtr compiled) {
  names.emplace(compiled->schema().name, id);
  table.ops.resize(id);  // ids of retired ops get null rows
  table.ops.push_back(make_row(std::move(compiled)));
}

bool is_custom(std::string_view op) {
  const size_t colons = op.find("::");
  return colons != std::string_view::npos && colons > 0 && colons + 2 < op.size();
}

std::string who(const te_fl_op_desc& desc, const std::string& owner) {
  const auto text = [](const char* s) { return s == nullptr ? std::string("?") : std::string(s); };
  return "implementation '" + text(desc.impl_id) + "' of op '" + text(desc.op_name) + "' (" +
         owner + ")";
}

constexpr uint64_t kHostTypes = uint64_t{1} << TE_FL_DEVICE_CPU |
                                uint64_t{1} << TE_FL_DEVICE_CUDA_HOST |
                                uint64_t{1} << TE_FL_DEVICE_ROCM_HOST;

int32_t default_priority(Kind kind) {
  switch (kind) {
    case Kind::kVendor:
      return TE_FL_PRIORITY_VENDOR;
    case Kind::kReference:
      return TE_FL_PRIORITY_REFERENCE;
    case Kind::kDefault:
      break;
  }
  return TE_FL_PRIORITY_DEFAULT;
}

// Checks the form "<kind>.<name>" of an implementation id (R16).
bool good_impl_id(std::string_view id, Kind kind) {
  const std::string head = std::string(to_string(kind)) + ".";
  if (id.size() <= head.size() || id.substr(0, head.size()) != head) return false;
  return std::all_of(id.begin(), id.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '_';
  });
}

Status check_desc(const te_fl_op_desc& desc, const std::string& owner, const std::string& vendor) {
  const auto bad = [&](const std::string& why) {
    return invalid_argument(who(desc, owner) + ": " + why);
  };
  if (desc.op_name == nullptr || *desc.op_name == '\0') return bad("op_name is missing");
  if (desc.impl_id == nullptr) return bad("impl_id is missing (rule R16)");
  if (desc.kind > TE_FL_KIND_REFERENCE) {
    return bad("kind " + std::to_string(desc.kind) +
               " is not a te_fl_kind (0 default, 1 vendor, 2 reference)");
  }
  const Kind kind = static_cast<Kind>(desc.kind);
  if (!good_impl_id(desc.impl_id, kind)) {
    return bad("impl_id must be '" + std::string(to_string(kind)) +
               ".<name>' in lower case letters, digits, dots and underscores (rule R16)");
  }
  if (desc.run == nullptr) return bad("run is NULL, but required (rule R4)");
  if (desc.prepare != nullptr && desc.destroy_plan == nullptr) {
    return bad("prepare is given without destroy_plan (rule R4)");
  }
  if (desc.max_arch != 0 && desc.max_arch < desc.min_arch) {
    return bad("no architecture lies between min_arch " + std::to_string(desc.min_arch) +
               " and max_arch " + std::to_string(desc.max_arch));
  }
  if (desc.device_types == 0) {
    return bad(
        "device_types is 0, so that no device matches; set the bit of each DLPack device type");
  }
  if ((desc.device_types >> TE_FL_DEVICE_EXT & 1) != 0 &&
      (desc.provider == nullptr || *desc.provider == '\0')) {
    return bad(
        "it supports kDLExtDev devices and names no provider, and one provider's memory is nothing "
        "that another's kernels could read; name it in te_fl_op_desc.provider (rule R18)");
  }
  if (desc.stream_state_bytes != 0 && (desc.device_types & kHostTypes) != 0) {
    return bad(
        "stream_state_bytes is set and device_types has the host, whose work has no stream (rule "
        "R27); register the host's implementation for itself, without it");
  }
  if (kind == Kind::kVendor && vendor.empty())
    return bad("a vendor implementation must name its vendor");
  return {};
}

// Refuses an implementation of an op with tensors whose dtype or scaling mask is 0, as in a zeroed
// C struct: such an implementation would match no call.
Status check_masks(const Implementation& impl, const te_fl_op_schema& schema) {
  const bool tensors =
      std::any_of(schema.args, schema.args + schema.arg_count, [](const te_fl_arg_desc* arg) {
        return arg->type == TE_FL_ARG_TENSOR || arg->type == TE_FL_ARG_TENSOR_LIST;
      });
  if (!tensors || (impl.desc.dtypes != 0 && impl.desc.scalings != 0)) return {};
  const bool none = impl.desc.dtypes == 0;
  return invalid_argument(
      who(impl.desc, impl.owner) + ": " + (none ? "dtypes" : "scalings") +
      " is 0, so that no call with tensors matches; set the bit of each " +
      (none ? "dtype, or TE_FL_MASK_ANY_DTYPE" : "scaling, 1 for tensors without"));
}

policy::Implementation make_view(const Implementation& impl, int32_t priority) {
  policy::Implementation o;
  o.impl_id = impl.impl_id;
  o.vendor = impl.vendor;
  o.kind = impl.kind;
  o.priority = priority;
  o.later = impl.later;
  o.flags = impl.desc.flags;
  o.min_arch = impl.desc.min_arch;
  o.max_arch = impl.desc.max_arch;
  o.dtypes = impl.desc.dtypes;
  o.scalings = impl.desc.scalings;
  o.device_types = impl.desc.device_types;
  o.owner = core::maker_number(impl.owner.c_str());
  if (impl.desc.provider != nullptr) o.provider = devices::intern_provider(impl.desc.provider);
  return o;
}

Result<uint32_t> row_for(Table& table, const Implementation& impl) {
  const te_fl_op_schema* schema = impl.desc.schema;
  if (schema != nullptr) {
    // A schema that is too small is not read beyond its struct_size.
    if (!core::plausible_size(schema->struct_size, core::kLeastSchema)) {
      return invalid_argument(who(impl.desc, impl.owner) + ": its schema has " +
                              core::size_text(schema->struct_size, core::kLeastSchema));
    }
    if (schema->name == nullptr || impl.op != schema->name) {
      return invalid_argument(who(impl.desc, impl.owner) + ": its schema is that of op '" +
                              (schema->name == nullptr ? "?" : schema->name) + "' (rule R17)");
    }
    return add_op(table, *schema, Naming::kOfPlugins);
  }
  const Result<uint32_t> found = find_op(table, impl.op);
  if (found.ok()) return found;
  if (is_custom(impl.op)) {
    return invalid_argument(who(impl.desc, impl.owner) +
                            ": a custom op must bring its schema (rule R17)");
  }
  return found.status().wrap(who(impl.desc, impl.owner));
}

}  // namespace

const char* intern_string(std::string_view text) {
  std::lock_guard lock(strings_mutex);
  static auto* const strings = new std::unordered_set<std::string>;  // never freed
  return strings->emplace(text).first->c_str();
}

constinit std::atomic<void (*)(uint64_t number)> g_stream_state_goes{nullptr};

Implementation::~Implementation() {
  plans.reset();
  if (desc.stream_state_bytes != 0) {
    if (const auto hook = g_stream_state_goes.load(std::memory_order_acquire)) hook(number);
  }
  free_counter(counter);
}

void add_with_id(Table& table, uint32_t id, CompiledPtr compiled) {
  auto names = std::make_shared<NameMap>(table.names == nullptr ? NameMap() : *table.names);
  put_row(table, *names, id, std::move(compiled));
  table.names = std::move(names);
}

void add_catalogue(Table& table) {
  const std::vector<CompiledPtr>& ops = compiled_catalogue();
  auto names = std::make_shared<NameMap>();
  for (size_t i = 0; i < ops.size(); ++i) put_row(table, *names, core::catalogue_ids()[i], ops[i]);
  table.names = std::move(names);
}

Result<uint32_t> add_op(Table& table, const te_fl_op_schema& schema, Naming naming) {
  if (!core::plausible_size(schema.struct_size, core::kLeastSchema)) {
    return invalid_argument("an op schema has " +
                            core::size_text(schema.struct_size, core::kLeastSchema));
  }
  if (schema.name == nullptr) return invalid_argument("an op schema has no name (rule R17)");
  const std::string name = schema.name;
  if (const auto at = table.names->find(name); at != table.names->end()) {
    const std::string difference = table.ops[at->second]->compiled->difference(schema);
    if (difference.empty()) return at->second;
    return Status(StatusCode::kAlreadyExists,
                  "op '" + name + "' is known with a different description, in which " +
                      difference + " (rule R17): rename the op, or make the descriptions equal");
  }
  if (naming == Naming::kOfPlugins && !is_custom(name)) {
    return invalid_argument("op '" + name + "' is not in the catalogue" +
                            core::did_you_mean(name, op_names(table)) +
                            "; a custom op is named 'vendor::op' (rule R17)");
  }
  auto compiled = core::CompiledOp::compile(schema);
  if (!compiled.ok()) return compiled.status().wrap("op '" + name + "' cannot be declared");
  const auto id = static_cast<uint32_t>(table.ops.size());
  add_with_id(table, id, std::move(compiled).value());
  return id;
}

Result<std::shared_ptr<Implementation>> make_implementation(
    const te_fl_op_desc* raw, const std::string& owner, const std::string& vendor,
    const std::shared_ptr<void>& keep_alive) {
  if (raw == nullptr) return invalid_argument("a null op descriptor (" + owner + ")");
  if (!core::plausible_size(raw->struct_size, core::kLeastOpDesc)) {
    return invalid_argument("an op descriptor of " + owner + " has " +
                            core::size_text(raw->struct_size, core::kLeastOpDesc));
  }
  const auto desc = core::copy_struct<te_fl_op_desc>(raw);
  const std::string of_vendor =
      core::lower(desc.vendor != nullptr ? std::string(desc.vendor) : vendor);
  TE_FL_RETURN_IF_ERROR(check_desc(desc, owner, of_vendor));
  auto impl = std::make_shared<Implementation>();
  impl->counter = allocate_counter();
  impl->number = g_numbers.fetch_add(1);
  impl->keep_alive = keep_alive;
  impl->op = desc.op_name;
  impl->impl_id = desc.impl_id;
  impl->vendor = of_vendor;
  impl->owner = owner;
  impl->interned_id = intern_string(impl->impl_id);
  impl->interned_op = intern_string(impl->op);
  impl->kind = static_cast<Kind>(desc.kind);
  impl->desc = desc;
  impl->desc.op_name = impl->op.c_str();
  impl->desc.impl_id = impl->impl_id.c_str();
  impl->desc.vendor = impl->vendor.c_str();
  if (desc.provider != nullptr) impl->desc.provider = intern_string(desc.provider);
  if (desc.later_args != nullptr) impl->desc.later_args = intern_string(desc.later_args);
  if (impl->desc.priority == 0) impl->desc.priority = default_priority(impl->kind);
  impl->checks_support = desc.supports != nullptr && (desc.flags & TE_FL_OP_STATIC_SUPPORT) == 0;
  impl->direct = desc.workspace == nullptr && desc.prepare == nullptr &&
                 desc.stream_state_bytes == 0 && (desc.flags & TE_FL_OP_THREAD_SAFE) != 0;
  impl->plan_memory = desc.prepare != nullptr && (desc.flags & TE_FL_OP_PLAN_MEMORY) != 0;
  if (desc.prepare != nullptr) impl->plans = std::make_unique<PlanCache>(*impl);
  return impl;
}

Status add_implementation(Table& table, std::shared_ptr<Implementation> impl) {
  TE_FL_ASSIGN_OR_RETURN(const uint32_t index, row_for(table, *impl));
  auto row = std::make_shared<OpRow>(*table.ops[index]);
  for (const auto& present : row->impls) {
    if (present->impl_id != impl->impl_id) continue;
    return Status(StatusCode::kAlreadyExists, who(impl->desc, impl->owner) +
                                                  " is registered already, by " + present->owner +
                                                  " (rule R16: unique per op)");
  }
  TE_FL_RETURN_IF_ERROR(check_masks(*impl, row->compiled->schema()));
  const Result<uint32_t> later = row->compiled->later_mask(impl->desc.later_args);
  if (!later.ok()) return later.status().wrap(who(impl->desc, impl->owner));
  impl->later = *later;
  // The plugin's schema may be freed with the plugin, so the row's copy replaces it.
  impl->desc.schema = &row->compiled->schema();
  impl->not_in_place =
      (impl->desc.flags & TE_FL_OP_IN_PLACE_OK) == 0 && allows_in_place(*impl->desc.schema);
  if (impl->not_in_place) impl->direct = false;
  row->views.push_back(make_view(*impl, impl->desc.priority));
  row->impls.push_back(std::move(impl));
  table.ops[index] = std::move(row);
  return {};
}

Status change_priority(Table& table, std::string_view op, std::string_view impl_id,
                       int32_t priority) {
  TE_FL_ASSIGN_OR_RETURN(const uint32_t index, find_op(table, op));
  auto row = std::make_shared<OpRow>(*table.ops[index]);
  std::vector<std::string> ids;
  for (policy::Implementation& view : row->views) {
    ids.emplace_back(view.impl_id);
    if (view.impl_id != impl_id) continue;
    view.priority = priority;
    table.ops[index] = std::move(row);
    return {};
  }
  return not_found("op '" + std::string(op) + "' has no implementation '" + std::string(impl_id) +
                   "'" + core::did_you_mean(impl_id, ids) + " (it has: " + core::join(ids) + ")");
}

std::vector<std::shared_ptr<Implementation>> remove_implementations(
    Table& table, const std::function<bool(const Implementation&)>& match) {
  std::vector<std::shared_ptr<Implementation>> removed;
  for (auto& shared_row : table.ops) {
    if (shared_row == nullptr) continue;
    const bool any = std::any_of(shared_row->impls.begin(), shared_row->impls.end(),
                                 [&](const auto& impl) { return match(*impl); });
    if (!any) continue;
    auto row = std::make_shared<OpRow>();
    row->compiled = shared_row->compiled;
    row->saved = shared_row->saved;
    for (size_t i = 0; i < shared_row->impls.size(); ++i) {
      if (match(*shared_row->impls[i])) {
        removed.push_back(shared_row->impls[i]);
      } else {
        row->impls.push_back(shared_row->impls[i]);
        row->views.push_back(shared_row->views[i]);
      }
    }
    shared_row = std::move(row);
  }
  return removed;
}

bool lists(const Table& table, const Implementation& impl) {
  return std::any_of(table.ops.begin(), table.ops.end(), [&](const auto& row) {
    return row != nullptr && std::any_of(row->impls.begin(), row->impls.end(),
                                         [&](const auto& listed) { return listed.get() == &impl; });
  });
}

std::vector<std::string> op_names(const Table& table) {
  std::vector<std::string> names;
  for (const auto& row : table.ops) {
    if (row != nullptr) names.emplace_back(row->compiled->schema().name);
  }
  return names;
}

Result<uint32_t> find_op(const Table& table, std::string_view op) {
  if (const auto at = table.names->find(op); at != table.names->end()) return at->second;
  return not_found("there is no op '" + std::string(op) + "'" +
                   core::did_you_mean(op, op_names(table)) + " (`te-fl ops` lists them)");
}

}  // namespace te_fl::registry
