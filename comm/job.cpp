#include <charconv>
#include <cstdlib>
#include <optional>

#include "te_fl/comm.hpp"
#include "te_fl/environment.hpp"

namespace te_fl {
namespace {

std::optional<std::string> system_variable(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

// Reads one of torchrun's variables; `fallback` if it is not set.
Result<int> number(const char* name, int least, int most, std::optional<int> fallback = {}) {
  const std::optional<std::string> text = system_variable(name);
  if (!text && fallback) return *fallback;
  if (!text) {
    return invalid_argument(
        std::string(name) +
        " is unset, and RANK or WORLD_SIZE is set: a job's ranks need both, and "
        "MASTER_ADDR and MASTER_PORT, as torchrun sets them; or TE_FL_RANK, "
        "TE_FL_WORLD_SIZE and TE_FL_STORE, as tools/launch.py does");
  }
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() || value < least || value > most) {
    return invalid_argument(std::string(name) + "=" + *text +
                            " is not accepted: it must be a whole number from " +
                            std::to_string(least) + " to " + std::to_string(most));
  }
  return value;
}

Status check_rank(const Job& job, const char* rank, const char* size) {
  if (job.rank < job.size) return {};
  return invalid_argument(std::string(rank) + "=" + std::to_string(job.rank) + " and " + size +
                          "=" + std::to_string(job.size) +
                          " contradict each other: ranks are 0 to the number of ranks less 1");
}

// Reads a setting whose type and range were checked before.
std::optional<int> setting(const char* name) {
  const std::optional<std::string> text = environment::get_if_set(name);
  if (!text || text->empty()) return std::nullopt;
  return std::atoi(text->c_str());
}

Result<Job> from_settings(std::optional<int> rank, std::optional<int> size) {
  if (!rank || !size) {
    return invalid_argument(std::string(rank ? "TE_FL_WORLD_SIZE" : "TE_FL_RANK") +
                            " is unset, and " + (rank ? "TE_FL_RANK" : "TE_FL_WORLD_SIZE") +
                            " is set: a job's ranks need both, and TE_FL_STORE (tools/launch.py "
                            "sets them)");
  }
  Job job{*rank, *size, setting("TE_FL_LOCAL_RANK").value_or(*rank), {}};
  job.store_address = environment::get_if_set("TE_FL_STORE").value_or("");
  TE_FL_RETURN_IF_ERROR(check_rank(job, "TE_FL_RANK", "TE_FL_WORLD_SIZE"));
  if (job.size == 1 || !job.store_address.empty()) return job;
  return invalid_argument("TE_FL_STORE is unset, and TE_FL_WORLD_SIZE is " +
                          std::to_string(job.size) +
                          ": the ranks find each other by file:PATH, a folder that all see, or "
                          "tcp://HOST:PORT, where rank 0 serves");
}

Result<Job> from_torchrun() {
  constexpr int kMost = 2147483647;
  Job job;
  TE_FL_ASSIGN_OR_RETURN(job.rank, number("RANK", 0, kMost - 1));
  TE_FL_ASSIGN_OR_RETURN(job.size, number("WORLD_SIZE", 1, kMost));
  TE_FL_ASSIGN_OR_RETURN(job.local_rank, number("LOCAL_RANK", 0, kMost - 1, job.rank));
  TE_FL_RETURN_IF_ERROR(check_rank(job, "RANK", "WORLD_SIZE"));
  if (job.size == 1) return job;
  TE_FL_ASSIGN_OR_RETURN(const int port, number("MASTER_PORT", 1, 65534));
  std::string host = system_variable("MASTER_ADDR").value_or("");
  if (host.empty()) {
    return invalid_argument("MASTER_ADDR is unset, and WORLD_SIZE is " + std::to_string(job.size) +
                            ": it names rank 0's machine, as torchrun sets it");
  }
  if (host.find(':') != std::string::npos && host.front() != '[') host = "[" + host + "]";
  // torchrun's own store uses the port itself, so this one uses the next port.
  job.store_address = "tcp://" + host + ":" + std::to_string(port + 1);
  return job;
}

}  // namespace

Result<Job> Job::from_environment() {
  TE_FL_RETURN_IF_ERROR(environment::status());
  const std::optional<int> rank = setting("TE_FL_RANK"), size = setting("TE_FL_WORLD_SIZE");
  if (rank || size) return from_settings(rank, size);
  if (system_variable("RANK") || system_variable("WORLD_SIZE")) return from_torchrun();
  return Job{};
}

}  // namespace te_fl
