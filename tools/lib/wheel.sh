# Sourced by tools/test.sh: the virtual environment in which the Python tests run, and te-fl's wheel in it.
te_fl_python_env=build/python-env

te_fl_no_test_python() { # WHAT
  echo "$1" >&2
  echo "The Python tests need PyTorch and JAX (tests/python/requirements.txt; 3 GB, from PyPI). Without PyPI name an interpreter that has" >&2
  echo "them, and scikit-build-core: TE_FL_TEST_PYTHON=/path/to/python tools/test.sh. tools/test.sh --quick does without." >&2
  return 1
}

# Creates $te_fl_python_env unless it exists with the same requirements. The packages come from PyPI, or, if TE_FL_TEST_PYTHON names
# an interpreter, from that interpreter.
te_fl_make_python_env() {
  local base=${TE_FL_TEST_PYTHON:-} python=$te_fl_python_env/bin/python made_from choice
  if [ -z "$base" ]; then
    for choice in python3 /usr/bin/python3; do
      if "$choice" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then base=$choice && break; fi
    done
    [ -n "$base" ] || { te_fl_no_test_python "No Python 3.11 or newer with its venv module was found (Debian: python3-venv)."; return 1; }
  elif ! "$base" -c 'import importlib.util as u, sys; sys.exit(not all(u.find_spec(m) for m in ("torch", "jax", "numpy")))'; then
    te_fl_no_test_python "TE_FL_TEST_PYTHON is '$base', which does not run or lacks torch, jax or numpy."
    return 1
  fi
  made_from=$("$base" -VV; command -v "$base"; echo "${TE_FL_TEST_PYTHON:-}"; cat tests/python/requirements.txt tests/python/requirements-inside.txt)
  if [ "$made_from" = "$(cat "$te_fl_python_env/made_from" 2>/dev/null)" ]; then
    echo "$te_fl_python_env is kept: it has what tests/python/requirements.txt names"
    te_fl_add_older_inside
    return 0
  fi
  rm -rf "$te_fl_python_env"
  "$base" -m venv "$te_fl_python_env" || { te_fl_no_test_python "$base -m venv failed (Debian: python3-venv)."; return 1; }
  if [ -n "${TE_FL_TEST_PYTHON:-}" ]; then
    "$base" -c 'import site; [print(f"import site; site.addsitedir({p!r})") for p in site.getsitepackages()]' \
      >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/te_fl_test_python.pth"
  else
    # The download has three gigabytes; if the connection breaks, a second attempt continues with the files already downloaded.
    local install=("$python" -m pip install --quiet --no-compile --disable-pip-version-check --retries 8 --timeout 60 -r tests/python/requirements.txt)
    "${install[@]}" || "${install[@]}" || {
      te_fl_no_test_python "pip could not install tests/python/requirements.txt; its messages are above."
      return 1
    }
    "$python" -m pip install --quiet --no-compile --disable-pip-version-check --retries 8 --timeout 60 --no-deps --target "$te_fl_python_env/inside" \
      -r tests/python/requirements-inside.txt || {
      te_fl_no_test_python "pip could not install tests/python/requirements-inside.txt; its messages are above."
      return 1
    }
  fi
  printf '%s\n' "$made_from" >"$te_fl_python_env/made_from"
  te_fl_add_older_inside
}

# Installs missing packages of requirements-inside-older.txt, a megabyte each; if PyPI is unreachable, their tests are skipped.
te_fl_add_older_inside() {
  local requirement folder
  [ -z "${TE_FL_TEST_PYTHON:-}" ] || return 0
  for requirement in $(sed 's/#.*//' tests/python/requirements-inside-older.txt); do
    folder=$te_fl_python_env/inside-${requirement#*==}
    [ -d "$folder" ] && continue
    rm -rf "$folder.part"
    "$te_fl_python_env/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --retries 8 --timeout 60 --no-deps --target "$folder.part" \
      "$requirement" && mv "$folder.part" "$folder" || echo "pip could not install $requirement; its tests are skipped" >&2
  done
}

# Packs the contents of BUILD into a wheel, checks that it is complete, and installs it in the environment.
te_fl_install_wheel() { # BUILD
  local python=$te_fl_python_env/bin/python isolation=()
  if "$python" -c 'import scikit_build_core' 2>/dev/null; then isolation=(--no-build-isolation); fi
  rm -rf build/wheel
  "$python" -m pip wheel . --disable-pip-version-check --no-deps "${isolation[@]}" --wheel-dir build/wheel --config-settings=cmake.source-dir=cmake/pack \
    --config-settings=cmake.define.TE_FL_PACK_BUILD="$PWD/$1" || {
    te_fl_no_test_python "The wheel could not be packed; pip's messages are above. It needs scikit-build-core."
    return 1
  }
  python3 tools/check_wheel.py build/wheel/te_fl-*.whl &&
    "$python" -m pip install --quiet --no-compile --disable-pip-version-check --force-reinstall --no-deps --no-index build/wheel/te_fl-*.whl
}
