#include "core/base/job_rank.hpp"

#include <cctype>
#include <cstdlib>
#include <string>

#include "te_fl/environment.hpp"

namespace te_fl::core {

std::optional<int> job_rank() {
  const std::string own = environment::get_if_set("TE_FL_RANK").value_or("");
  if (!own.empty()) return std::atoi(own.c_str());
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && std::isdigit(static_cast<unsigned char>(*value)) != 0)
      return std::atoi(value);
  }
  return std::nullopt;
}

}  // namespace te_fl::core
