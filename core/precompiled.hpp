// What most files of te-fl begin with, compiled once for each library (te_fl_precompile() in
// CMakeLists.txt). A file includes what it uses all the same: the thread sanitizer's build compiles
// without this.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>
