// Precompiled header with the headers that most tests include (tests/CMakeLists.txt). Tests still
// include what they use, so that they compile without it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "te_fl/te_fl.hpp"
