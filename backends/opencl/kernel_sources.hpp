// The text of kernels/*.cl, which the build puts into the library.
#pragma once

namespace te_fl::opencl {

struct KernelSource {
  const char* name;  // of the file, without its ending; NULL ends the table
  const char* text;
};
extern const KernelSource kKernelSources[];

}  // namespace te_fl::opencl
