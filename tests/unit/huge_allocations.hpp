// For tests that ask for more memory than there is: the sanitizers' allocators shall return null,
// as the C library's does, instead of ending the program. Include it in one file of a program.
#pragma once

#include "unit/sanitizers.hpp"

#if TE_FL_ASAN
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
#endif
#if TE_FL_TSAN
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "allocator_may_return_null=1";
}
#endif
