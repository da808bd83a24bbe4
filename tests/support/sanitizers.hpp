// Tells which sanitizer a test is built with (g++ and clang say it differently), and what each
// cannot do in a forked child.
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

// TSAN keeps the parent's threads in its books in a forked child, and stops the child when one of
// its own threads gets the same address.
#define TE_FL_SKIP_FORK_THEN_THREADS() \
  if (TE_FL_TSAN) GTEST_SKIP() << "the thread sanitizer cannot start threads in a forked child"

// ASAN's allocator, unlike the C library's, does not put its locks in order around a fork.
#define TE_FL_SKIP_FORK_WHILE_ALLOCATING()                        \
  if (TE_FL_ASAN || TE_FL_TSAN)                                   \
  GTEST_SKIP() << "the sanitizer's allocator may be locked in a " \
                  "child forked while other threads allocate"
