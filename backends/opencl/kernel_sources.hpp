// The contents of kernels/*.cl, which the build embeds in the library.
#pragma once

namespace te_fl::opencl {

struct KernelSource {
  const char* name;  // file name without extension; NULL ends the table
  const char* text;
};
extern const KernelSource kKernelSources[];

}  // namespace te_fl::opencl
