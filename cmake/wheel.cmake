# The wheel's files below its root (component "python"): the native module, libte_fl, te-fl, the plugins, and those libraries
# that cannot be expected on another machine. scikit-build-core adds the package's own .py files (pyproject.toml).
if(SKBUILD_PROJECT_VERSION AND NOT SKBUILD_PROJECT_VERSION STREQUAL PROJECT_VERSION)
  message(FATAL_ERROR "pyproject.toml has version ${SKBUILD_PROJECT_VERSION}, include/te_fl/version.hpp ${PROJECT_VERSION}: set the first")
endif()
te_fl_in_wheel(te_fl_python te_fl)
te_fl_in_wheel(te_fl_shared te_fl/lib)
if(TARGET te_fl_tool)
  te_fl_in_wheel(te_fl_tool te_fl/bin)
endif()
# Files of the site-packages folder itself, such as one that runs when the interpreter starts.
file(GLOB top_level CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/python/*.pth)
if(top_level)
  install(FILES ${top_level} DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
endif()

get_property(wheel_targets GLOBAL PROPERTY TE_FL_WHEEL_TARGETS)
get_property(opened GLOBAL PROPERTY TE_FL_OPENED_LIBRARIES)
add_custom_target(te_fl_wheel DEPENDS ${wheel_targets})
set(soname libte_fl.so.${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
configure_file(cmake/bundle.cmake.in ${CMAKE_BINARY_DIR}/bundle.cmake @ONLY)
install(SCRIPT ${CMAKE_BINARY_DIR}/bundle.cmake COMPONENT python EXCLUDE_FROM_ALL)
