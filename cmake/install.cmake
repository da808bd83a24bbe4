# A relocatable prefix: library, headers, te-fl, CMake package, pkg-config file, plugins folder.
include(CMakePackageConfigHelpers)

# From the start: the empty places that CMake leaves for it otherwise mean the working directory to the dynamic linker.
set_target_properties(te_fl_shared PROPERTIES INSTALL_RPATH "$ORIGIN" BUILD_WITH_INSTALL_RPATH ON)
install(TARGETS te_fl_shared EXPORT te_fl_targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/te_fl DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET te_fl_tool)
  set(run_path "$ORIGIN/../lib" "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}") # a wheel's and the build's, a prefix's
  list(REMOVE_DUPLICATES run_path)
  set_target_properties(te_fl_tool PROPERTIES INSTALL_RPATH "${run_path}" BUILD_WITH_INSTALL_RPATH ON)
  install(TARGETS te_fl_tool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
# What `te-fl conformance` reads below its prefix; the build tree is one.
install(FILES conformance/expected_unsupported.txt conformance/not_covered.txt DESTINATION share/te_fl/conformance)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/share/te_fl)
file(CREATE_LINK ${CMAKE_SOURCE_DIR}/conformance ${CMAKE_BINARY_DIR}/share/te_fl/conformance SYMBOLIC)
# Manifests of plugins go to plugins.d, where te-fl looks for them; libraries beside it.
install(DIRECTORY DESTINATION ${CMAKE_INSTALL_LIBDIR}/te_fl/plugins.d)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES cmake/plugin.map DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/te_fl)
install(EXPORT te_fl_targets NAMESPACE te_fl:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/te_fl)
configure_package_config_file(cmake/te_flConfig.cmake.in ${CMAKE_BINARY_DIR}/te_flConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/te_fl PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/te_flConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/te_flConfig.cmake ${CMAKE_BINARY_DIR}/te_flConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/te_fl)
configure_file(cmake/te_fl.pc.in ${CMAKE_BINARY_DIR}/te_fl.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/te_fl.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
