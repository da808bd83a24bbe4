# Sourced by the scripts in tools/: functions that configure and build a build folder.
te_fl_jobs=${TE_FL_BUILD_JOBS:-$(nproc)}
te_fl_launchers=()
if command -v ccache >/dev/null; then
  # Relative paths let another clone use the same cache entries. A precompiled header is compared by its contents, not by
  # its time.
  export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD} CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
  te_fl_launchers=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
fi

# A new build folder uses unity builds (TE_FL_UNITY). An existing one keeps its setting, because unity builds make each incremental
# build slower.
te_fl_unity() { # FOLDER
  local setting=ON
  if [ -f "$1/CMakeCache.txt" ]; then
    setting=$(sed -n 's/^TE_FL_UNITY:BOOL=//p' "$1/CMakeCache.txt")
  fi
  echo "-DTE_FL_UNITY=${setting:-OFF}"
}

te_fl_configure() { # FOLDER CMAKE_ARGUMENTS...
  local folder=$1
  shift
  cmake -S . -B "$folder" -G Ninja "${te_fl_launchers[@]}" "$@"
}

# One build for the tests and the fuzzers: address and undefined-behaviour sanitizers with the fuzzers' instrumentation.
te_fl_configure_sanitized() { # FOLDER SANITIZERS CMAKE_ARGUMENTS...
  local folder=$1 sanitizers=$2
  shift 2
  te_fl_configure "$folder" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DTE_FL_SANITIZE="$sanitizers" -DTE_FL_BUILD_TESTS=ON -DTE_FL_BUILD_TOOLS=OFF \
    -DTE_FL_BUILD_EXAMPLES=OFF -DTE_FL_BUILD_BENCH=OFF -DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=lld -DCMAKE_SHARED_LINKER_FLAGS=-fuse-ld=lld \
    -DCMAKE_MODULE_LINKER_FLAGS=-fuse-ld=lld --log-level=WARNING "$@"
}
te_fl_configure_asan() { te_fl_configure_sanitized build/asan address,undefined,fuzzer-no-link -DTE_FL_UNITY=ON -DTE_FL_BUILD_FUZZ=ON "$@"; } # CMAKE_ARGUMENTS...
te_fl_configure_tsan() { te_fl_configure_sanitized build/tsan thread -DTE_FL_UNITY=ON "$@"; } # CMAKE_ARGUMENTS...
