#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "registry/table.hpp"

// Changes to an unpublished table, and the validation of new entries.
namespace te_fl::registry {

// Adds the catalogue's ops, without implementations.
void add_catalogue(Table& table);
// Adds an op with an id that is greater than all ids of the table. Skipped ids have no op.
void add_with_id(Table& table, uint32_t id, std::shared_ptr<const core::CompiledOp> compiled);
// The rule for the name of a custom op. Plugins must use "vendor::op" (R17); a program may use any
// name.
enum class Naming { kOfPlugins, kAny };
// Adds a custom op, or finds the existing op if its description is equal (R17).
Result<uint32_t> add_op(Table& table, const te_fl_op_schema& schema, Naming naming);
// Validates and copies a descriptor.
Result<std::shared_ptr<Implementation>> make_implementation(
    const te_fl_op_desc* desc, const std::string& owner, const std::string& vendor,
    const std::shared_ptr<void>& keep_alive);
// Adds an implementation to the row of its op. Declares the op first if the descriptor brings a
// custom op.
Status add_implementation(Table& table, std::shared_ptr<Implementation> impl);
Status change_priority(Table& table, std::string_view op, std::string_view impl_id,
                       int32_t priority);
// Removes and returns the implementations for which `match` returns true.
std::vector<std::shared_ptr<Implementation>> remove_implementations(
    Table& table, const std::function<bool(const Implementation&)>& match);

bool lists(const Table& table, const Implementation& impl);
std::vector<std::string> op_names(const Table& table);
// Finds an op by name. The error for an unknown name suggests the closest one.
Result<uint32_t> find_op(const Table& table, std::string_view op);

}  // namespace te_fl::registry
