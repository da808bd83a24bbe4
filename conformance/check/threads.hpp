#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace te_fl_tool::check {

// The names of this process's threads by their ids.
std::map<std::string, std::string> threads_now();

// True if a thread of this process waits inside calls that code with such addresses made, or was
// started with such a function: an address of that kind lies on its stack. True as well of one that
// is busy, whose stack cannot be looked at; false of one that has ended.
bool runs_code(const std::string& thread, const std::function<bool(uintptr_t)>& of_interest);

}  // namespace te_fl_tool::check
