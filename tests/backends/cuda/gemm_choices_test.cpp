// The CUDA plugin shares measured choices of GEMM algorithms between threads and processes. Needs
// no GPU and no CUDA.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <latch>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/gemm/gemm_algorithm_book.hpp"
#include "support/expect.hpp"
#include "te_fl/backend.hpp"

namespace te_fl::cuda::gemm_choices_test {
namespace {

GemmChoice choice(const std::string& problem, int power_limit = 700, uint64_t id = 1) {
  GemmChoice c;
  c.device = "GPU";
  c.problem = problem;
  c.library = 130100;
  c.power_limit = power_limit;
  c.algorithm[0] = id;
  return c;
}

class CudaGemmChoices : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "choicesXXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder = name;
    file = folder + "/choices.json";
  }
  void TearDown() override { std::filesystem::remove_all(folder); }
  std::set<std::string> problems_in_file() const {
    std::set<std::string> names;
    for (const GemmChoice& c : read_choices(file, false)) names.insert(c.problem);
    return names;
  }
  std::string folder, file;
};

template <class F>
std::string catch_error(F&& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

TEST_F(CudaGemmChoices, AreForAPowerLimit) {
  const std::vector<GemmChoice> all{choice("a", 700, 1), choice("a", 350, 2), choice("b", 0, 3)};
  const auto id = [&](const char* problem, int limit) {
    const GemmChoice* found = find_choice(all, "GPU", 130100, limit, problem);
    return found != nullptr ? found->algorithm[0] : 0;
  };
  EXPECT_EQ(id("a", 700), 1u);
  EXPECT_EQ(id("a", 350), 2u);
  EXPECT_EQ(id("a", 500), 0u) << "measured under other limits only";
  EXPECT_EQ(id("b", 500), 3u) << "of a file whose limits nobody knew";
  EXPECT_EQ(id("a", 0), 1u) << "where the limit is not known, any serves";
  EXPECT_EQ(find_choice(all, "another GPU", 130100, 700, "a"), nullptr);
  EXPECT_EQ(find_choice(all, "GPU", 130101, 700, "a"), nullptr);
  std::vector<GemmChoice> both = all;
  both.push_back(choice("b", 500, 4));
  EXPECT_EQ(find_choice(both, "GPU", 130100, 500, "b")->algorithm[0], 4u) << "the exact one first";
  std::istringstream in(gemm_choices_text(both));
  EXPECT_EQ(parse_gemm_choices(in), both);
}

TEST_F(CudaGemmChoices, OfManyProcessesAndThreadsAreAllKept) {
  constexpr int kProcesses = 4, kThreads = 3, kEach = 8;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::vector<std::thread> threads;
      for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
          for (int i = 0; i < kEach; ++i) {
            add_choices(file, {choice(std::to_string(p) + "." + std::to_string(t) + "." +
                                      std::to_string(i)),
                               choice("shared " + std::to_string(i))});
          }
        });
      }
      for (std::thread& t : threads) t.join();
      _exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(problems_in_file().size(), size_t{kProcesses * kThreads * kEach + kEach});
  EXPECT_EQ(read_choices(file, false).size(), size_t{kProcesses * kThreads * kEach + kEach})
      << "each once";
  std::set<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    left.insert(entry.path().filename());
  }
  EXPECT_EQ(left, (std::set<std::string>{"choices.json", "choices.json.lock"}));
}

TEST_F(CudaGemmChoices, WhatTheFileHasStays) {
  add_choices(file, {choice("a", 700, 1)});
  const std::vector<GemmChoice> there =
      add_choices(file, {choice("a", 700, 2), choice("a", 350, 3)});
  ASSERT_EQ(there.size(), 2u);
  EXPECT_EQ(there[0].algorithm[0], 1u) << "so that all ranks take the same";
  EXPECT_EQ(there[1].power_limit, 350);
}

TEST_F(CudaGemmChoices, AForeignFileIsLeftAsItIs) {
  std::ofstream(file) << "half a {";
  EXPECT_HAS(catch_error([&] { add_choices(file, {choice("a")}); }), "is not a file of choices");
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  EXPECT_EQ(text.str(), "half a {");
  const std::string nowhere = folder + "/none/choices.json";
  EXPECT_HAS(catch_error([&] { add_choices(nowhere, {choice("a")}); }), "No such file");
  EXPECT_EQ(catch_error([&] { read_choices(nowhere, true); }), "");
  EXPECT_HAS(catch_error([&] { read_choices(nowhere, false); }), "cannot be read: No such file");
}

TEST_F(CudaGemmChoices, ACallWithAChoiceDoesNotWaitForAMeasurement) {
  ChoiceBook book;
  add_choices(file, {choice("known")});
  book.configure(file, true);
  std::latch inside{1}, looked{1};
  std::thread measuring([&] {
    (void)book.find_or_measure(0, choice("new"), [&] {
      inside.count_down();
      looked.wait();  // the test deadlocks if the look-ups below wait for this measurement
      return std::optional(choice("new"));
    });
  });
  inside.wait();
  EXPECT_TRUE(book.find(choice("known")));
  EXPECT_FALSE(book.find(choice("new")));
  EXPECT_FALSE(book.empty());
  EXPECT_EQ(book.error(), "");
  looked.count_down();
  measuring.join();
  EXPECT_TRUE(book.find(choice("new")));
  EXPECT_EQ(problems_in_file(), (std::set<std::string>{"known", "new"}));
}

TEST_F(CudaGemmChoices, AProblemIsMeasuredOnce) {
  ChoiceBook book;
  book.configure(file, true);
  std::atomic<int> measured{0}, together{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      const GemmChoice key = choice(t % 2 == 0 ? "a" : "b");
      const auto found = book.find_or_measure(0, key, [&] {
        EXPECT_EQ(together.fetch_add(1), 0) << "another would show in the times";
        ++measured;
        --together;
        return std::optional(key);
      });
      EXPECT_TRUE(found && found->problem == key.problem);
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(measured.load(), 2);
}

TEST_F(CudaGemmChoices, DevicesMeasureSideBySide) {
  ChoiceBook book;
  book.configure(file, true);
  std::latch both{2};
  const auto measure = [&](int device, const char* problem) {
    (void)book.find_or_measure(device, choice(problem), [&] {
      both.arrive_and_wait();  // the test deadlocks if one measurement waits for the other
      return std::optional(choice(problem));
    });
  };
  std::thread other([&] { measure(1, "b"); });
  measure(0, "a");
  other.join();
  EXPECT_EQ(problems_in_file(), (std::set<std::string>{"a", "b"}));
}

TEST_F(CudaGemmChoices, WhatAnotherProcessMeasuredIsTaken) {
  ChoiceBook book;
  book.configure(file, true);
  add_choices(file, {choice("a", 700, 5)});  // simulates another process
  const auto never = [&]() -> std::optional<GemmChoice> {
    ADD_FAILURE() << "measured again";
    return std::nullopt;
  };
  EXPECT_EQ(book.find_or_measure(0, choice("a"), never)->algorithm[0], 5u);
  // Simulates another process that writes the file while this one measures.
  const auto late = [&] {
    add_choices(file, {choice("b", 700, 6)});
    return std::optional(choice("b", 700, 7));
  };
  EXPECT_EQ(book.find_or_measure(0, choice("b"), late)->algorithm[0], 6u);
  EXPECT_EQ(book.find(choice("b"))->algorithm[0], 6u);
}

TEST_F(CudaGemmChoices, AMeasurementThatFailsGivesTheTurnBack) {
  ChoiceBook book;
  book.configure(file, true);
  EXPECT_THROW((void)book.find_or_measure(
                   0, choice("a"),
                   []() -> std::optional<GemmChoice> { throw std::runtime_error("no memory"); }),
               std::runtime_error);
  EXPECT_FALSE(book.find_or_measure(0, choice("a"), [] { return std::optional<GemmChoice>(); }));
  EXPECT_TRUE(book.find_or_measure(0, choice("a"), [] { return std::optional(choice("a")); }));
}

TEST_F(CudaGemmChoices, SettingsThatCannotBeAreErrorsOfEachLookUp) {
  ChoiceBook book;
  book.configure("", true);
  EXPECT_HAS(book.error(), "TE_FL_CUDA_GEMM_FILE is unset; name the file");
  EXPECT_THROW((void)book.find(choice("a")), backend::Error);
  book.configure(file, false);
  EXPECT_HAS(book.error(),
             "cannot be read: No such file or directory; name a file that "
             "TE_FL_CUDA_GEMM_TUNE=1 has written");
  std::ofstream(file) << "{}";
  book.configure(file, true);
  EXPECT_HAS(book.error(), "is not a file of choices");
  book.configure("", false);
  EXPECT_EQ(book.error(), "");
  EXPECT_TRUE(book.empty());
  EXPECT_FALSE(book.tunes());
}

}  // namespace
}  // namespace te_fl::cuda::gemm_choices_test
