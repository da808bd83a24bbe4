// te-fl check: the selection of targets and cases by the options.
#pragma once

#include <string>
#include <vector>

#include "conformance/case.hpp"
#include "conformance/check/check.hpp"

namespace te_fl_tool::check {

// The cases of an op that the options select, including random ones. Includes sweep cases only if
// --case names any ("relu/sweep/5x128"); otherwise chosen_sweep() returns these.
te_fl::conformance::Table chosen_cases(const CheckOptions& options,
                                       const te_fl::conformance::Table& all, const std::string& op);
te_fl::conformance::Table chosen_sweep(const CheckOptions& options, const std::string& op);
bool is_chosen_device_step(const CheckOptions& options, const std::string& name);

// Adds the targets of `all` that the options select, and their devices, to the report, and the
// excluded targets to its left_out. Returns the error text of a wrong option, with a suggestion;
// empty if there is none.
std::string choose(const CheckOptions& options, const std::vector<Target>& all, Report& report);

}  // namespace te_fl_tool::check
