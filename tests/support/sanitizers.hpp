// Macros that name the sanitizer of this build (TE_FL_ASAN, TE_FL_TSAN), for g++ and clang, and
// that skip tests whose forked children the sanitizer does not support.
#pragma once

#if defined(__has_feature)
#define TE_FL_HAS_FEATURE(x) __has_feature(x)
#else
#define TE_FL_HAS_FEATURE(x) 0
#endif

#if defined(__SANITIZE_THREAD__) || TE_FL_HAS_FEATURE(thread_sanitizer)
#define TE_FL_TSAN 1
#else
#define TE_FL_TSAN 0
#endif

#if defined(__SANITIZE_ADDRESS__) || TE_FL_HAS_FEATURE(address_sanitizer)
#define TE_FL_ASAN 1
#else
#define TE_FL_ASAN 0
#endif

// In a forked child, TSAN still lists the parent's threads and aborts when a new thread gets the
// address of one of them.
#define TE_FL_SKIP_FORK_THEN_THREADS() \
  if (TE_FL_TSAN) GTEST_SKIP() << "the thread sanitizer cannot start threads in a forked child"

// ASAN's allocator, unlike the C library's, does not make its locks consistent around fork().
#define TE_FL_SKIP_FORK_WHILE_ALLOCATING()                        \
  if (TE_FL_ASAN || TE_FL_TSAN)                                   \
  GTEST_SKIP() << "the sanitizer's allocator may be locked in a " \
                  "child forked while other threads allocate"
