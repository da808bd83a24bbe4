// The headers that most tests begin with, compiled once for all of them (tests/CMakeLists.txt). A
// test includes what it uses all the same, so that it compiles without this.
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
