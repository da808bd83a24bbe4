# The cases of conformance, of huge tensors and of benchmarks, one file per family in cases/, and what runs the first two, as a
# library: for the programs in this folder, for bench_cpu and for te-fl. It sees include/te_fl only; what links it brings
# te-fl, static or shared.
file(GLOB conformance_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cpp ${CMAKE_CURRENT_LIST_DIR}/cases/*.cpp
  ${CMAKE_CURRENT_LIST_DIR}/huge/*.cpp)
list(FILTER conformance_sources EXCLUDE REGEX "main\\.cpp$")
add_library(te_fl_conformance STATIC ${conformance_sources})
target_include_directories(te_fl_conformance PUBLIC ${CMAKE_SOURCE_DIR}/tests PRIVATE ${CMAKE_SOURCE_DIR}/include)
target_link_libraries(te_fl_conformance PUBLIC te_fl_bench_cases PRIVATE te_fl_options nlohmann_json::nlohmann_json)
te_fl_precompile(te_fl_conformance)
if(TE_FL_SANITIZE) # the oracles; what they hand to the code under test is allocated under the sanitizer all the same
  target_compile_options(te_fl_conformance PRIVATE -fno-sanitize=all)
endif()
