// conformance_huge: runs ops on tensors of more than 2^31 elements and checks sampled elements.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "conformance/huge/cases.hpp"

namespace {

using namespace te_fl;        // NOLINT: a program's main file
using namespace te_fl::huge;  // NOLINT

constexpr int64_t kDefault = (int64_t{1} << 31) + 4099;  // odd, and slightly more than 31 bits hold

constexpr const char* kUsage =
    "usage: conformance_huge [--device DEVICE] [--plugin PATH] [--impl IMPL] [--op NAME] "
    "[--elements N]\n"
    "       conformance_huge --self-check [--device DEVICE] [--plugin PATH] [--op NAME] "
    "[--elements N]\n"
    "  --impl IMPL   what must run every case: this implementation, or one whose name goes on "
    "from it\n"
    "                with a dot; a case that anything else runs has failed\n"
    "  --elements N  of the largest tensor, at least (default 2147487747; that takes up to 40 GiB "
    "of a device)\n"
    "  --self-check  reads one wrong element of each result: a case that passes has failed\n";

struct Options {
  std::string device = "cpu", plugin, impl, op;
  int64_t elements = kDefault;
  bool self_check = false;
};

int usage(const std::string& why) {
  std::fprintf(stderr, "conformance_huge: %s\n%s", why.c_str(), kUsage);
  return 2;
}

// Parses the command line; returns "" or an error.
std::string parse(int argc, char** argv, Options& o) {
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--self-check") {
      o.self_check = true;
      continue;
    }
    if (i + 1 == argc) return option + " requires a value";
    const std::string value = argv[++i];
    char* end = nullptr;
    if (option == "--device") {
      o.device = value;
    } else if (option == "--plugin") {
      o.plugin = value;
    } else if (option == "--impl") {
      o.impl = value;
    } else if (option == "--op") {
      o.op = value;
    } else if (option == "--elements") {
      o.elements = std::strtoll(value.c_str(), &end, 10);
      if (*end != '\0' || o.elements < 4096) {
        return "--elements is " + value + "; it must be a number, 4096 or more";
      }
    } else {
      return "unknown argument '" + option + "'";
    }
  }
  return {};
}

// Returns the implementations that have run `op` since the usage counters were reset.
std::set<std::string> served_by(const std::string& op) {
  std::set<std::string> ids;
  for (const OpUsage& u : OpManager::instance().usage()) {
    if (u.op == op) ids.insert(u.impl_id);
  }
  return ids;
}

// Runs a case and prints its result line; returns false if the case failed.
bool run_case(const Case& c, Device device, const Options& o) {
  OpManager::instance().reset_usage();
  const auto start = std::chrono::steady_clock::now();
  Run run(device, o.elements, o.impl);
  if (o.self_check) run.spoil();
  c.run(run);
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  std::string impls;
  for (const std::string& id : served_by(c.op)) {
    impls += (impls.empty() ? "" : "+") + id;
    if (!o.impl.empty() && id != o.impl && id.rfind(o.impl + ".", 0) != 0) {
      run.fail("was run by " + id + ", expected " + o.impl);
    }
  }
  if (impls.empty()) run.fail("did not run"), impls = "none";
  if (o.self_check) run.expect_failure();
  std::printf("%-44s %-38s %-18s %s %5.1f s  %s\n", c.op.c_str(), c.what.c_str(), impls.c_str(),
              run.failed() ? "FAILED" : "passed", spent.count(), run.failure().c_str());
  std::fflush(stdout);
  return !run.failed();
}

// Prints the catalogue's ops that no case runs; each counts as a failure. Collectives are exempt:
// each rank would need the memory of a whole case.
int report_uncovered(const Cases& cases) {
  std::set<std::string> covered;
  for (const Case& c : cases) covered.insert(c.op);
  int missing = 0;
  const OpRegistry& registry = OpManager::instance().registry();
  for (const std::string& op : registry.op_names()) {
    if (op.find("::") != std::string::npos || covered.count(op) != 0) continue;
    if ((registry.schema(*registry.find(op))->flags & TE_FL_SCHEMA_COLLECTIVE) != 0) continue;
    std::printf("%-44s FAILED: no case\n", op.c_str());
    ++missing;
  }
  return missing;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--help" || option == "-h") return std::printf("%s", kUsage), 0;
  }
  Options o;
  if (const std::string wrong = parse(argc, argv, o); !wrong.empty()) return usage(wrong);
  if (!o.plugin.empty()) {
    const auto loaded = plugins::load(o.plugin);
    if (!loaded.ok()) return usage(loaded.status().to_string());
  }
  const auto device = parse_device(o.device);
  if (!device.ok()) return usage(device.status().to_string());
  const Cases cases = all_cases();
  int failed = 0, run_count = 0;
  for (const Case& c : cases) {
    if (!o.op.empty() && o.op != c.op) continue;
    ++run_count;
    if (!run_case(c, device.value(), o)) ++failed;
  }
  if (run_count == 0) return usage("--op is " + o.op + ", which is not among the cases");
  const int missing = o.op.empty() ? report_uncovered(cases) : 0;
  std::printf("%d passed, %d failed, %d ops without a case, tensors of %lld elements\n",
              run_count - failed, failed, missing, static_cast<long long>(o.elements));
  return failed == 0 && missing == 0 ? 0 : 1;
}
