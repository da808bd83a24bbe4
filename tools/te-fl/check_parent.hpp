// te-fl check: functions that only the parent process (check.cpp) uses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/check/check.hpp"

namespace te_fl_tool::check {

// Adds time ("2026-11-22T10:00:00Z"), machine, processor, te-fl's version and ABI to the report.
void describe_run(const CheckOptions& options, Report& report);

// Describes the code at an offset from a library's base: "relu(float const*, long)+0x1c
// (libacme.so)", or "libacme.so+0x11c0" if the library has no symbol there.
std::string code_at(const std::string& library, uint64_t offset);

// Returns why the file at `path` cannot be read (it does not exist, is a folder or a device, or
// lacks permission); empty if it can.
std::string why_unreadable(const std::string& path);

// Inspects the plugin's file without loading it. Sets `stop` if there is nothing that could be
// loaded.
std::vector<Finding> lint(const std::string& path, bool& stop);

// Runs the cases of the report's collectives again with each rank in its own process; returns the
// findings. If no case ran on several ranks, the report's `not_run` says why.
std::vector<Finding> check_processes(const CheckOptions& options, Report& report);

// Times every op of the report with `te-fl bench` and adds the results. Before timing, compares the
// results of a large call with the reference; returns the findings of that comparison.
std::vector<Finding> measure_speed(const CheckOptions& options, Report& report);

}  // namespace te_fl_tool::check
