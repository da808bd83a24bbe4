#include "te_fl/result_memory.hpp"

#include <utility>

namespace te_fl {
namespace {

constinit thread_local const ResultMemory* t_innermost = nullptr;

}  // namespace

ResultMemory::ResultMemory(Make make)
    : make_(std::move(make)), outer_(std::exchange(t_innermost, this)) {}

ResultMemory::~ResultMemory() { t_innermost = outer_; }

const ResultMemory* ResultMemory::innermost() noexcept { return t_innermost; }

}  // namespace te_fl
