#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "registry/table.hpp"

// Changes to a table that is not published yet, and the checks of what is registered.
namespace te_fl::registry {

// The catalogue's ops, without implementations.
void add_catalogue(Table& table);
// Adds an op under an id that is greater than those of the table; ids in between stay without one.
void add_with_id(Table& table, uint32_t id, std::shared_ptr<const core::CompiledOp> compiled);
// Plugins name their custom ops "vendor::op" (R17); a program that declares one names it as it
// likes.
enum class Naming { kOfPlugins, kAny };
// Adds a custom op, or finds the one that is there if the description is the same (R17).
Result<uint32_t> add_op(Table& table, const te_fl_op_schema& schema, Naming naming);
// Checks and copies a descriptor.
Result<std::shared_ptr<Implementation>> make_implementation(
    const te_fl_op_desc* desc, const std::string& owner, const std::string& vendor,
    const std::shared_ptr<void>& keep_alive);
// Adds it to its op's row, declaring a custom op that it brings.
Status add_implementation(Table& table, std::shared_ptr<Implementation> impl);
Status change_priority(Table& table, std::string_view op, std::string_view impl_id,
                       int32_t priority);
// Takes out and returns what `match` picks.
std::vector<std::shared_ptr<Implementation>> remove_implementations(
    Table& table, const std::function<bool(const Implementation&)>& match);

bool lists(const Table& table, const Implementation& impl);
std::vector<std::string> op_names(const Table& table);
// A misspelt name is an error that names the nearest.
Result<uint32_t> find_op(const Table& table, std::string_view op);

}  // namespace te_fl::registry
