// Part of every test program of a sanitizer build: tests ask for more memory than there is, and the
// sanitizers' allocators shall return null then, as the C library's does, instead of ending the
// program.
#include "support/sanitizers.hpp"

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
