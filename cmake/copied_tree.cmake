# Runs first in every `cmake --install`. What CMake writes for it has absolute paths, so that a copy of a build tree would install
# the original's files, or none if that is gone: in a copy these paths are replaced by the copy's own, once.
set(te_fl_built_in [[@CMAKE_BINARY_DIR@]])
file(REAL_PATH "${te_fl_built_in}" te_fl_original)
file(REAL_PATH "${CMAKE_CURRENT_LIST_DIR}" te_fl_here)
if(NOT te_fl_here STREQUAL te_fl_original)
  set(te_fl_source [[@CMAKE_SOURCE_DIR@]])
  file(RELATIVE_PATH te_fl_up "${te_fl_built_in}" "${te_fl_source}")
  file(REAL_PATH "${te_fl_up}" te_fl_source_here BASE_DIRECTORY "${te_fl_here}")
  cmake_policy(SET CMP0009 NEW) # links are not followed, of which python/ has some that lead out
  file(GLOB_RECURSE te_fl_scripts LIST_DIRECTORIES false "${te_fl_here}/cmake_install.cmake")
  foreach(te_fl_script ${te_fl_scripts})
    file(READ "${te_fl_script}" te_fl_text)
    string(REPLACE "${te_fl_built_in}" "<here>" te_fl_text "${te_fl_text}") # a copy may lie inside the original's folders
    if(EXISTS "${te_fl_source_here}/include/te_fl/version.hpp") # else the sources have stayed where they were
      string(REPLACE "${te_fl_source}/" "${te_fl_source_here}/" te_fl_text "${te_fl_text}")
    endif()
    string(REPLACE "<here>" "${te_fl_here}" te_fl_text "${te_fl_text}")
    file(REMOVE "${te_fl_script}") # a copy made of hard links shares it
    file(WRITE "${te_fl_script}" "${te_fl_text}")
  endforeach()
  include("${te_fl_here}/cmake_install.cmake")
  return()
endif()
