// conformance_huge: ops on tensors of more than 2^31 elements, checked at sampled places.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cases.hpp"

namespace {

using namespace te_fl;                     // NOLINT: a program's main file
using namespace te_fl::conformance::huge;  // NOLINT

constexpr int64_t kDefault = (int64_t{1} << 31) + 4099;  // odd, and a little more than fits 31 bits

constexpr const char* kUsage =
    "usage: conformance_huge [--device DEVICE] [--plugin PATH] [--op NAME] [--elements N]\n"
    "  --elements N  of the largest tensor (default 2147487747; BF16: 4 GiB a tensor, two or three "
    "at once)\n";

int usage(const std::string& why) {
  std::fprintf(stderr, "conformance_huge: %s\n%s", why.c_str(), kUsage);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  std::string device_name = "cpu", plugin, op;
  int64_t elements = kDefault;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--help" || option == "-h") return std::printf("%s", kUsage), 0;
    if (i + 1 == argc) return usage(option + " wants a value");
    const std::string value = argv[++i];
    char* end = nullptr;
    if (option == "--device") {
      device_name = value;
    } else if (option == "--plugin") {
      plugin = value;
    } else if (option == "--op") {
      op = value;
    } else if (option == "--elements") {
      elements = std::strtoll(value.c_str(), &end, 10);
      if (*end != '\0' || elements < 4096) {
        return usage("--elements is " + value + "; it must be a number, 4096 or more");
      }
    } else {
      return usage("unknown argument '" + option + "'");
    }
  }
  if (!plugin.empty()) {
    const auto loaded = plugins::load(plugin);
    if (!loaded.ok()) return usage(loaded.status().to_string());
  }
  const auto device = parse_device(device_name);
  if (!device.ok()) return usage(device.status().to_string());
  int failed = 0, run_count = 0;
  for (const Case& c : cases()) {
    if (!op.empty() && op != c.op) continue;
    ++run_count;
    OpManager::instance().reset_usage();
    const auto start = std::chrono::steady_clock::now();
    Run run(device.value(), elements);
    c.run(run);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    std::string impl = "none";
    for (const OpUsage& u : OpManager::instance().usage()) {
      if (u.op == c.op) impl = u.impl_id;
    }
    if (run.failed()) ++failed;
    std::printf("%-24s %-18s %s %6.1f s  %s\n", c.op, impl.c_str(),
                run.failed() ? "FAILED" : "passed", spent.count(), run.failure().c_str());
    std::fflush(stdout);
  }
  if (run_count == 0) return usage("--op is " + op + ", which is not among the cases");
  std::printf("%d passed, %d failed, tensors of %lld elements\n", run_count - failed, failed,
              static_cast<long long>(elements));
  return failed == 0 ? 0 : 1;
}
