// Compiles small shared libraries when a test starts.
#pragma once

#include <cstdlib>
#include <string>

#include "support/temp_folder.hpp"

#ifndef TE_FL_TEST_CXX
#define TE_FL_TEST_CXX "c++"
#endif

namespace te_fl::test {

class LibraryFixture : public ::testing::Test {
 protected:
  // Compiles `source` into `folder_`/name with extra flags; relative paths in the flags refer to
  // the folder. Returns the library's path.
  std::string build(const std::string& name, const std::string& source,
                    const std::string& flags = "") {
    folder_.write(name + ".cpp", source);
    const std::string command = "cd '" + folder_.path() +
                                "' && " TE_FL_TEST_CXX " -shared -fPIC -O0 -o " + name + " " +
                                name + ".cpp " + flags + " > " + name + ".log 2>&1";
    const int status = std::system(command.c_str());
    EXPECT_EQ(status, 0) << command << "\n" << read_file(folder_ / (name + ".log"));
    return folder_ / name;
  }

  TempFolder folder_;
};

}  // namespace te_fl::test
