#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace te_fl_tool::check {

// The threads of this process: id to name.
std::map<std::string, std::string> threads_now();

// True if the stack of a waiting thread of this process contains a code address for which
// `of_interest` returns true: that code has called the function that waits, or is the thread's
// start function. Also true for a running thread, whose stack cannot be read. False for a thread
// that has ended.
bool runs_code(const std::string& thread, const std::function<bool(uintptr_t)>& of_interest);

}  // namespace te_fl_tool::check
