// Linked into every test program of a sanitizer build. Tests request more memory than exists; the
// sanitizers' allocators must then return null, as the C library's does, and not end the program.
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
