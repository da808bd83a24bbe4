// te-fl check: which part of a plugin, and which cases, the options choose.
#pragma once

#include <string>
#include <vector>

#include "conformance/case.hpp"
#include "conformance/check/check.hpp"

namespace te_fl_tool::check {

// The cases of an op that the options choose, drawn ones among them, and those of the sweep if
// --case names any ("relu/sweep/5x128"); else these are left to chosen_sweep().
te_fl::conformance::Table chosen_cases(const CheckOptions& options,
                                       const te_fl::conformance::Table& all, const std::string& op);
te_fl::conformance::Table chosen_sweep(const CheckOptions& options, const std::string& op);
bool is_chosen_device_step(const CheckOptions& options, const std::string& name);

// Puts those of `all` that the options choose into the report's targets and devices, and what is
// not looked at into its left_out. Empty, or the option's mistake with the nearest right name.
std::string choose(const CheckOptions& options, const std::vector<Target>& all, Report& report);

}  // namespace te_fl_tool::check
