// A user's program with three modes: `one_call gelu` calls an op a few times, `one_call to DEVICE`
// moves a tensor from four threads at once and calls no op, and `one_call host` calls an op and
// prints which libraries are mapped.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "te_fl/te_fl.hpp"

namespace {

te_fl::Status gelu() {
  const float values[] = {-1, 0, 2};
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Tensor x,
                         te_fl::Tensor::from_values({3}, values, te_fl::DType::kBF16));
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Tensor y, te_fl::Tensor::empty({3}, te_fl::DType::kBF16));
  for (int i = 0; i < 3; ++i) TE_FL_RETURN_IF_ERROR(te_fl::ops::gelu({.input = x, .output = y}));
  return {};
}

te_fl::Status to(const char* name) {
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Device device, te_fl::parse_device(name));
  const float values[] = {1, 2, 3};
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Tensor x, te_fl::Tensor::from_values({3}, values));
  te_fl::Status statuses[4];
  std::vector<std::thread> threads;
  for (te_fl::Status& status : statuses)
    threads.emplace_back([&] { status = x.to(device).status(); });
  for (std::thread& thread : threads) thread.join();
  for (const te_fl::Status& status : statuses) TE_FL_RETURN_IF_ERROR(status);
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Tensor there, x.to(device));
  TE_FL_ASSIGN_OR_RETURN(const te_fl::Tensor back, there.to(te_fl::Device{}));
  std::printf("%g on %s\n", back.data<float>()[2], name);
  return {};
}

te_fl::Status mapped() {
  TE_FL_RETURN_IF_ERROR(gelu());
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t at = line.rfind('/');
    if (at != std::string::npos && line.ends_with(".so"))
      std::printf("%s\n", line.c_str() + at + 1);
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  const bool moves = argc == 3 && std::strcmp(argv[1], "to") == 0;
  const bool lists = argc == 2 && std::strcmp(argv[1], "host") == 0;
  const te_fl::Status status = moves ? to(argv[2]) : lists ? mapped() : gelu();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
