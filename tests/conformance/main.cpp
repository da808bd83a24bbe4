#include "conformance/program.hpp"

int main(int argc, char** argv) {
  return te_fl::conformance::run_program(argc, argv, TE_FL_CONFORMANCE_DIR);
}
