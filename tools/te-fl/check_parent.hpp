// te-fl check: the parts that only its parent (check.cpp) uses, which no child does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/check/check.hpp"

namespace te_fl_tool::check {

// "2026-11-22T10:00:00Z", the machine and its processor, te-fl's version and ABI.
void describe_run(const CheckOptions& options, Report& report);

// The place of the code at an offset from a library's base: "relu(float const*, long)+0x1c
// (libacme.so)", or "libacme.so+0x11c0" if the library has no name for it.
std::string code_at(const std::string& library, uint64_t offset);

// The reason for which no bytes of the file at a path can be had: it is not there, is a folder or a
// device, or may not be read. Empty: they can.
std::string why_unreadable(const std::string& path);

// The file, without opening it. `stop` is set if nothing that could be opened is there.
std::vector<Finding> lint(const std::string& path, bool& stop);

// Runs the cases of the report's collectives once more, on ranks that are processes, and returns
// what they found. If no case ran on several, the report's `not_run` says why.
std::vector<Finding> check_processes(const CheckOptions& options, Report& report);

// Times every op of the report with `te-fl bench` and adds what it said. Returns what came of the
// comparison of a large call's results with the reference's, which goes before.
std::vector<Finding> measure_speed(const CheckOptions& options, Report& report);

}  // namespace te_fl_tool::check
