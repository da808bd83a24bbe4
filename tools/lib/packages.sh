# Sourced by the scripts in tools/: installs missing Debian/Ubuntu packages, or prints the command to install them.
te_fl_need_packages() {
  local missing=() package
  for package in "$@"; do
    # "a|b": either package suffices; the first is installed if both are missing.
    local found=0 choice
    for choice in ${package//|/ }; do
      if dpkg-query -W -f='${Status}' "$choice" 2>/dev/null | grep -q '^install ok installed'; then found=1; fi
    done
    [ "$found" = 1 ] || missing+=("${package%%|*}")
  done
  if [ "${#missing[@]}" = 0 ]; then
    echo "packages: all ${#} present"
    return 0
  fi
  echo "packages: missing ${missing[*]}"
  local line="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" != 0 ]; then
    echo "Not root, so nothing was installed. Run this and start again:" >&2
    echo "  sudo sh -c '$line'" >&2
    return 1
  fi
  echo "+ $line"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || {
    echo "packages: apt-get failed; the packages above are needed, see docs/dependencies.md" >&2
    return 1
  }
}

te_fl_build_packages=(g++ cmake ninja-build pkg-config libspdlog-dev nlohmann-json3-dev libcli11-dev libhwy-dev libdnnl-dev ocl-icd-opencl-dev opencl-headers)
te_fl_test_packages=(libgtest-dev libbenchmark-dev clang lld clang-format patchelf python3 python3-dev python3-numpy python3-venv python3-yaml pocl-opencl-icd libclblast1 libgloo-dev)
te_fl_example_packages=()
