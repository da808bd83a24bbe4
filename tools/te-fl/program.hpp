#pragma once

namespace te_fl_tool {

// The program te-fl: parses the arguments, runs the command, and returns the exit code. argv ends
// with a null pointer. main() is this alone; the Python package calls it in its own process, where
// implementations in Python and devices of PyTorch exist.
int run_program(int argc, char** argv);

}  // namespace te_fl_tool
