// A repeated call (after its first calls) allocates nothing and takes no lock. The test counts
// allocations and locks by replacing the C library's functions.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

#include "support/dispatch_fixture.hpp"
#include "support/expect.hpp"
#include "support/sanitizers.hpp"
#include "te_fl/ops/optimizer.h"

// Sanitizers replace these functions themselves.
#define TE_FL_SANITIZED (TE_FL_ASAN || TE_FL_TSAN)

namespace {

// Count this thread's allocations and locks while t_counting is set.
constinit thread_local bool t_counting = false;
constinit thread_local int t_allocations = 0;
constinit thread_local int t_locks = 0;

}  // namespace

#if !TE_FL_SANITIZED

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t bytes) {
  if (t_counting) ++t_allocations;
  return __libc_malloc(bytes);
}
void* calloc(size_t n, size_t bytes) {
  if (t_counting) ++t_allocations;
  return __libc_calloc(n, bytes);
}
void* realloc(void* p, size_t bytes) {
  if (t_counting) ++t_allocations;
  return __libc_realloc(p, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  if (t_counting) ++t_allocations;
  return __libc_memalign(alignment, bytes);
}

#define TE_FL_COUNT_LOCK(name, type)                           \
  int name(type* lock) {                                       \
    using Function = int (*)(type*);                           \
    static std::atomic<Function> next{nullptr};                \
    Function f = next.load(std::memory_order_relaxed);         \
    if (f == nullptr) {                                        \
      f = reinterpret_cast<Function>(dlsym(RTLD_NEXT, #name)); \
      next.store(f, std::memory_order_relaxed);                \
    }                                                          \
    if (t_counting) ++t_locks;                                 \
    return f(lock);                                            \
  }
TE_FL_COUNT_LOCK(pthread_mutex_lock, pthread_mutex_t)
TE_FL_COUNT_LOCK(pthread_mutex_trylock, pthread_mutex_t)
TE_FL_COUNT_LOCK(pthread_rwlock_rdlock, pthread_rwlock_t)
TE_FL_COUNT_LOCK(pthread_rwlock_wrlock, pthread_rwlock_t)
TE_FL_COUNT_LOCK(pthread_spin_lock, pthread_spinlock_t)
}

#endif

namespace te_fl {
namespace {

using testing::Fake;
using testing::FiveCall;

te_fl_status nothing(void*, const te_fl_context*, const void*) { return TE_FL_OK; }

struct Counts {
  int allocations;
  int locks;
};

template <class F>
Counts counted(F&& f) {
  t_allocations = t_locks = 0;
  t_counting = true;
  f();
  t_counting = false;
  return {t_allocations, t_locks};
}

class HotPath : public ::testing::Test {
 protected:
  void SetUp() override {
    if (TE_FL_SANITIZED) GTEST_SKIP() << "allocations and locks cannot be counted";
    for (Fake* f : {&portable, &vendor}) {
      f->desc.run = &nothing;
      ASSERT_OK(registry.register_op(f->desc, "tests", "acme"));
    }
    op = *registry.find("test::five");
  }
  // Runs a few warm-up calls, then many calls; expects all to succeed without an allocation or a
  // lock.
  template <class F>
  void expect_clean(F&& call) {
    bool good = true;
    for (int i = 0; i < 3; ++i) good = good && call().ok();
    const Counts counts = counted([&] {
      for (int i = 0; i < 1000; ++i) good = call().ok() && good;
    });
    EXPECT_TRUE(good);
    EXPECT_EQ(counts.allocations, 0);
    EXPECT_EQ(counts.locks, 0);
  }

  static void give_plans(Fake& fake) {
    fake.desc.prepare = [](void*, const te_fl_context*, const void*, void** plan) -> te_fl_status {
      *plan = nullptr;
      return TE_FL_OK;
    };
    fake.desc.destroy_plan = [](void*, void*) {};
  }
  static std::vector<std::unique_ptr<FiveCall>> make_shapes(int64_t count) {
    std::vector<std::unique_ptr<FiveCall>> calls;
    for (int64_t n = 1; n <= count; ++n) {
      calls.push_back(std::make_unique<FiveCall>(DType::kF32, std::vector<int64_t>{n, 3}));
    }
    return calls;
  }

  OpRegistry registry;
  OpManager manager{registry};
  Fake portable{"default.p"}, vendor{"vendor.v"};
  FiveCall five;
  OpId op;
};

TEST_F(HotPath, TheCountersCount) {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  const Counts counts = counted([&] {
    void* volatile p = malloc(10);
    free(p);
    delete new int(1);
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
  });
  EXPECT_GE(counts.allocations, 1);
  EXPECT_EQ(counts.locks, 1);
  // Building an error allocates strings: this shows that the counters also count inside the
  // library.
  five.args.a = nullptr;
  EXPECT_GT(counted([&] { EXPECT_FALSE(manager.call(op, &five.args).ok()); }).allocations, 0);
}

TEST_F(HotPath, Call) {
  expect_clean([&] { return manager.call(op, &five.args); });
}

TEST_F(HotPath, PreparedHandle) {
  const auto handle = manager.prepare(op, &five.args);
  ASSERT_OK(handle);
  expect_clean([&] { return handle->call(&five.args); });
}

TEST_F(HotPath, EnteringAndLeavingScopes) {
  PolicySettings s;
  s.prefer = Kind::kVendor;
  const SelectionPolicy policy = SelectionPolicy::intern(s);
  expect_clean([&] {
    const Status outside = manager.call(op, &five.args);
    const PolicyScope scope(policy);
    const Status inside = manager.call(op, &five.args);
    return outside.ok() ? inside : outside;
  });
}

TEST_F(HotPath, GlobalPolicyChanges) {
  PolicySettings s;
  s.prefer = Kind::kVendor;
  const SelectionPolicy a = SelectionPolicy::intern(s), b = SelectionPolicy::intern({});
  int i = 0;
  expect_clean([&] {
    set_global_policy(++i % 2 == 0 ? a : b);
    return manager.call(op, &five.args);
  });
  clear_global_policy();
}

TEST_F(HotPath, SupportsWorkspaceAndPlans) {
  portable.desc.flags &= ~uint32_t{TE_FL_OP_STATIC_SUPPORT};
  portable.desc.supports = [](void*, const te_fl_context*, const void*) -> te_fl_status {
    return TE_FL_OK;
  };
  portable.desc.workspace = [](void*, const te_fl_context*, const void*,
                               size_t* bytes) -> te_fl_status {
    *bytes = 100000;
    return TE_FL_OK;
  };
  give_plans(portable);
  ASSERT_OK(registry.unregister_op("test::five", "default.p"));
  ASSERT_OK(registry.register_op(portable.desc));
  expect_clean([&] { return manager.call(op, &five.args); });
}

// A call that is not in the per-thread memo finds its plan under a lock. Some of the 600 shapes are
// evicted from the memo, because more calls hash into one of its sets than the set holds; which
// ones depends on the op.
TEST_F(HotPath, ManyPlannedShapes) {
  give_plans(portable);
  ASSERT_OK(registry.unregister_op("test::five", "default.p"));
  ASSERT_OK(registry.register_op(portable.desc));
  const auto calls = make_shapes(600);
  size_t next = 0;
  bool good = true;
  const auto pass = [&] {
    for (size_t i = 0; i < calls.size(); ++i) {
      good = manager.call(op, &calls[next++ % calls.size()]->args).ok() && good;
    }
  };
  pass();
  const Counts counts = counted(pass);
  EXPECT_TRUE(good);
  EXPECT_EQ(counts.allocations, 0);
  EXPECT_LE(counts.locks, 30);
}

TEST_F(HotPath, SavedRecords) {
  Fake forward("default.p", testing::save_schema(true));
  Fake backward("default.p", testing::save_schema(false));
  for (Fake* f : {&forward, &backward}) {
    f->desc.run = &nothing;
    give_plans(*f);
    ASSERT_OK(registry.register_op(f->desc));
  }
  const Tensor x = Tensor::zeros({4}, DType::kF32).value();
  const Tensor y = Tensor::zeros({4}, DType::kF32).value();
  te_fl_saved record;
  testing::SaveArgs args;
  args.x = x;
  args.y = y;
  args.saved = &record;
  const OpId first = *registry.find("test::save_fwd"), second = *registry.find("test::save_bwd");
  expect_clean([&] {
    const Status done = manager.call(first, &args);
    return done.ok() ? manager.call(second, &args) : done;
  });
  EXPECT_STREQ(record.producer, "default.p");
}

TEST_F(HotPath, ListsThatMove) {
  Fake scale("default.p");
  scale.desc.op_name = "multi_tensor_scale";
  scale.desc.schema = nullptr;
  scale.desc.later_args = nullptr;
  scale.desc.dtypes = TE_FL_MASK_ANY_DTYPE;
  scale.desc.run = &nothing;
  give_plans(scale);
  ASSERT_OK(registry.register_op(scale.desc));
  const Tensor flag = Tensor::zeros({1}, DType::kI32).value();
  std::vector<Tensor> tensors;
  for (int i = 0; i < 12; ++i) tensors.push_back(Tensor::zeros({200}, DType::kF32).value());
  const std::vector<const te_fl_tensor*> lists(tensors.begin(), tensors.end());
  te_fl_multi_tensor_scale_args first;
  first.inputs_count = first.outputs_count = 3;
  first.inputs = lists.data();
  first.outputs = lists.data() + 3;
  first.noop_flag = flag;
  te_fl_multi_tensor_scale_args second = first;
  second.inputs += 6;
  second.outputs += 6;
  const OpId id = *registry.find("multi_tensor_scale");
  ASSERT_OK(manager.call(id, &first));
  int i = 0;
  expect_clean([&] { return manager.call(id, ++i % 2 == 0 ? &first : &second); });
}

TEST_F(HotPath, ManyShapes) {
  const auto calls = make_shapes(600);
  for (const auto& call : calls) ASSERT_OK(manager.call(op, &call->args));
  size_t next = 0;
  expect_clean([&] { return manager.call(op, &calls[next++ % calls.size()]->args); });
}

}  // namespace
}  // namespace te_fl
