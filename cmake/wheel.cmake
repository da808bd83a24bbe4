# The wheel's files below its root (component "python"): the native module, libte_fl, te-fl, the plugins, and those libraries
# that cannot be expected on another machine. scikit-build-core adds the package's own .py files (pyproject.toml).
if(SKBUILD_PROJECT_VERSION AND NOT SKBUILD_PROJECT_VERSION STREQUAL PROJECT_VERSION)
  message(FATAL_ERROR "pyproject.toml has version ${SKBUILD_PROJECT_VERSION}, include/te_fl/version.hpp ${PROJECT_VERSION}: set the first")
endif()
foreach(target te_fl_python te_fl_python_check)
  if(TARGET ${target})
    te_fl_in_wheel(${target} te_fl)
  endif()
endforeach()
te_fl_in_wheel(te_fl_shared te_fl/lib)
if(TARGET te_fl_tool)
  te_fl_in_wheel(te_fl_tool te_fl/bin)
endif()
# What a project of `te-fl new-backend` builds against, with a wheel as with a prefix; te_fl/ is the prefix.
install(DIRECTORY include/te_fl DESTINATION te_fl/include COMPONENT python EXCLUDE_FROM_ALL)
function(te_fl_wheel_package soname)
  set(CMAKE_INSTALL_LIBDIR lib)
  set(CMAKE_INSTALL_INCLUDEDIR include)
  set(folder ${CMAKE_BINARY_DIR}/wheel)
  configure_package_config_file(cmake/te_flConfig.cmake.in ${folder}/te_flConfig.cmake
    INSTALL_DESTINATION lib/cmake/te_fl PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR)
  configure_file(cmake/wheel_targets.cmake.in ${folder}/te_fl_targets.cmake @ONLY)
  install(FILES ${folder}/te_flConfig.cmake ${folder}/te_fl_targets.cmake ${CMAKE_BINARY_DIR}/te_flConfigVersion.cmake cmake/plugin.map
    DESTINATION te_fl/lib/cmake/te_fl COMPONENT python EXCLUDE_FROM_ALL)
endfunction()
set(soname libte_fl.so.${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
te_fl_wheel_package(${soname})
install(FILES conformance/expected_unsupported.txt conformance/not_covered.txt
  DESTINATION te_fl/share/te_fl/conformance COMPONENT python EXCLUDE_FROM_ALL)
install(DIRECTORY docs DESTINATION te_fl COMPONENT python EXCLUDE_FROM_ALL)
install(DIRECTORY backends/torch/ DESTINATION te_fl/reference_torch COMPONENT python EXCLUDE_FROM_ALL FILES_MATCHING PATTERN "*.py")
install(DIRECTORY backends/xla/ DESTINATION te_fl/reference_xla COMPONENT python EXCLUDE_FROM_ALL FILES_MATCHING PATTERN "*.py")
# Files of the site-packages folder itself, such as one that runs when the interpreter starts.
file(GLOB top_level CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/python/*.pth)
if(top_level)
  install(FILES ${top_level} DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
endif()

get_property(wheel_targets GLOBAL PROPERTY TE_FL_WHEEL_TARGETS)
get_property(opened GLOBAL PROPERTY TE_FL_OPENED_LIBRARIES)
add_custom_target(te_fl_wheel DEPENDS ${wheel_targets})
configure_file(cmake/bundle.cmake.in ${CMAKE_BINARY_DIR}/bundle.cmake @ONLY)
install(SCRIPT ${CMAKE_BINARY_DIR}/bundle.cmake COMPONENT python EXCLUDE_FROM_ALL)
