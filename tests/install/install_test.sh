#!/usr/bin/env bash
# Installs the build, moves the prefix, and builds and runs against the moved prefix only: a consumer by CMake and by
# pkg-config, and the out-of-tree plugins, selected by TE_FL_PREFER and by TE_FL_PER_OP.
# usage: install_test.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source_dir=$1 build_dir=$2
work=$build_dir/install_test
rm -rf "$work" && mkdir -p "$work"
unset TE_FL_PLUGIN_PATH
cmake --install "$build_dir" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/moved"
prefix=$work/moved
lib=$(dirname "$(find "$prefix" -name libte_fl.so | head -n1)")

fail() { echo "FAILED: $*" >&2; exit 1; }
expect() { # WHAT PATTERN TEXT
  grep -q -- "$2" <<<"$3" || fail "$1: expected '$2' in:
$3"
  echo "ok: $1"
}

if nm -D --defined-only "$lib/libte_fl.so" | c++filt | grep -v -E ' (te_fl::|typeinfo (name )?for te_fl::|vtable for te_fl::|VTT for te_fl::|guard variable for te_fl::)' | grep .; then
  fail "libte_fl.so exports more than namespace te_fl (above)"
fi
echo "ok: libte_fl.so exports namespace te_fl only"
if nm -D "$lib/libte_fl.so" | grep ' u '; then fail "libte_fl.so has GNU_UNIQUE symbols"; fi

license=$(find "$prefix/share/doc" -name LICENSE)
cmp "$license" "$source_dir/LICENSE" || fail "the licence is not installed"
echo "ok: the licence is installed"

# A copy of a build tree installs its own files. Made of links, beside the build, it costs no space.
copy=$build_dir.copy
rm -rf "$copy" && mkdir "$copy"
trap 'rm -rf "$copy"' EXIT
(cd "$build_dir" && cp -rl --parents CMakeFiles/Export "$copy" && find . \( -name CMakeFiles -o -path ./install_test \) -prune -o ! -type d -print0 |
  xargs -0 cp -Pl --parents -t "$copy")
cmake --install "$copy" --prefix "$work/of_copy" >/dev/null
if grep -qF "$build_dir/" "$copy/cmake_install.cmake"; then fail "the copy of the build tree installs the original's files"; fi
diff <(cd "$prefix" && find . | sort) <(cd "$work/of_copy" && find . | sort) || fail "the copy of the build tree installs other files"
echo "ok: a copy of the build tree installs its own files"

cmake -S "$source_dir/tests/install" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$prefix" -G Ninja >/dev/null
cmake --build "$work/consumer" >/dev/null
expect "consumer built with find_package" '^silu default.cpu$' "$("$work/consumer/consumer")"

# A process that uses no device of a plugin does not open its drivers, and loading says nothing.
text=$(TEFL_LOG_LEVEL=DEBUG "$work/consumer/consumer" 2>&1)
if grep -q 'plugin opencl' <<<"$text"; then fail "an op on the host loads the OpenCL plugin: $text"; fi
echo "ok: an op on the host loads no plugin that waits for its devices"
[ -z "$("$prefix/bin/te-fl" ops 2>&1 >/dev/null)" ] || fail "te-fl ops writes to standard error"
echo "ok: te-fl is quiet"

export PKG_CONFIG_PATH=$lib/pkgconfig
# shellcheck disable=SC2046
c++ "$source_dir/tests/install/consumer.cpp" -o "$work/pc_consumer" $(pkg-config --cflags --libs te_fl) -Wl,-rpath,"$lib"
expect "consumer built with pkg-config" '^silu default.cpu$' "$("$work/pc_consumer")"

cp -r "$source_dir/examples/out_of_tree_plugin" "$work/plugin_source"
cmake -S "$work/plugin_source" -B "$work/plugins" -DCMAKE_PREFIX_PATH="$prefix" -G Ninja >/dev/null
cmake --build "$work/plugins" >/dev/null
for p in acme_c acme_cpp; do
  exported=$(nm -D --defined-only "$work/plugins/lib$p.so" | awk '{print $3}')
  [ "$exported" = te_fl_plugin_query ] || fail "lib$p.so exports: $exported"
done
echo "ok: the plugins export te_fl_plugin_query only"

export TE_FL_PLUGIN_MODULES=$work/plugins/libacme_c.so,$work/plugins/libacme_cpp.so
te_fl=$prefix/bin/te-fl
expect "both plugins are active" 'acme_cpp.*active' "$("$te_fl" info)"
expect "default priority keeps the portable one" '^silu default.cpu$' "$("$work/consumer/consumer")"
expect "TE_FL_PREFER=vendor selects the C plugin" '^silu vendor.acme_c$' "$(TE_FL_PREFER=vendor "$work/consumer/consumer")"
expect "TE_FL_PER_OP selects it too" '^silu vendor.acme_c$' "$(TE_FL_PER_OP='silu=vendor:acme' "$work/consumer/consumer")"
expect "TE_FL_PER_OP by id" '^silu reference.host$' "$(TE_FL_PER_OP='silu=impl:reference.host' "$work/consumer/consumer")"
expect "explain agrees" '-> *vendor.acme_cpp' "$("$te_fl" explain swiglu --dtype f32 --set TE_FL_PREFER=vendor)"
expect "the custom op is listed" 'acme::twice' "$("$te_fl" ops)"
expect "denied vendor is not used" '^silu default.cpu$' "$(TE_FL_DENY_VENDORS=acme TE_FL_PREFER=vendor "$work/consumer/consumer")"
unset TE_FL_PLUGIN_MODULES

# A manifest in the prefix's own folder is found from wherever the prefix stands.
cp "$work/plugins/libacme_c.so" "$lib/te_fl/"
cat >"$lib/te_fl/plugins.d/acme_c.json" <<JSON
{"file_format_version": "1.0", "name": "acme_c", "vendor": "acme", "library_path": "../libacme_c.so",
 "arch": "$(uname -m)", "abi": "0.9", "probe": {"always": true}}
JSON
expect "manifest in the prefix" 'acme_c.*active' "$("$te_fl" info)"
rm "$lib/te_fl/plugins.d/acme_c.json"

# A project made by te-fl new-backend builds against the prefix and is certified as it is.
cd "$work"
"$te_fl" new-backend acme acme >/dev/null
expect "new-backend: the project is certified" '^certified: [1-9][0-9]* passed, 0 failed' "$(TE_FL_PREFIX=$prefix acme/ci.sh)"
for file in check.json check.xml check.html; do [ -s "acme/build/$file" ] || fail "ci.sh left no build/$file"; done
cmake --build acme/build --target test >/dev/null || fail "ctest of the project"
echo "ok: new-backend: ctest of the project"
expect "te-fl conformance is installed" '[1-9][0-9]* passed, 0 failed' \
  "$("$te_fl" conformance --plugin acme/build/libte_fl_acme.so --impl vendor.acme --op relu --reduced)"
subfolder=${lib#"$prefix"/}/te_fl/plugins.d
cmake --install acme/build --prefix "$work/elsewhere" >/dev/null
[ -s "$work/elsewhere/$subfolder/acme.json" ] && [ ! -e "$prefix/$subfolder/acme.json" ] || fail "cmake --install --prefix of the project"
expect "new-backend: installed below another prefix" 'acme .*active.*elsewhere' "$(TE_FL_PLUGIN_PATH=$work/elsewhere/$subfolder "$te_fl" info)"
cmake --install acme/build >/dev/null
expect "new-backend: the installed plugin is found" 'acme .*active' "$("$te_fl" info)"
code=0 && quick=$(TE_FL_PREFIX=$prefix acme/ci.sh --quick) || code=$?
[ "$code" = 4 ] || fail "ci.sh --quick: exit code $code, expected 4"
expect "new-backend: the built one is checked beside it" '^no certificate: [1-9][0-9]* passed, 0 failed' "$quick"
expect "new-backend: a quick check is no certificate" 'not everything was checked: --quick' "$quick"
expect "new-backend: the installed one is checked by name" '^no certificate: [1-9][0-9]* passed, 0 failed' "$("$te_fl" check acme --quick)"
rm "$lib/te_fl/plugins.d/acme.json"
sed -i 's/value < 0 ? 0 : value/value < 0.25f ? 0 : value/' acme/src/relu.cpp
if broken=$(TE_FL_PREFIX=$prefix acme/ci.sh --quick); then fail "a broken kernel was certified: $broken"; fi
expect "new-backend: a broken line is found" 'tolerance' "$broken"
expect "new-backend: a broken line is not certified" '^not certified' "$broken"
command=$(sed -n 's/^ *te-fl \(check .*--case .*\)$/\1/p' <<<"$broken" | head -n1)
if again=$(cd / && eval "\"$te_fl\" $command"); then fail "te-fl $command: passes"; fi
expect "new-backend: the command reproduces it" 'tolerance' "$again"
# The same with a device of its own.
"$te_fl" new-backend chip chip --device >/dev/null
expect "new-backend --device: the project is certified" "^certified" "$(TE_FL_PREFIX=$prefix chip/ci.sh)"
export TE_FL_PLUGIN_MODULES=$work/chip/build/libte_fl_chip.so
expect "new-backend --device: the device is there" 'ext:chip:0 *chip' "$("$te_fl" info)"
expect "new-backend --device: its op is native" '-> *vendor.chip' "$("$te_fl" explain relu --dtype f32 --device ext:chip:0)"
expect "new-backend --device: others are run by the host" 'chosen: staged' "$("$te_fl" explain gelu --dtype f32 --device ext:chip:0)"
unset TE_FL_PLUGIN_MODULES
cmake --install chip/build --prefix "$work/elsewhere" >/dev/null
export TE_FL_PLUGIN_PATH=$work/elsewhere/$subfolder
text=$(TEFL_LOG_LEVEL=DEBUG "$work/consumer/consumer" 2>&1)
if grep -q 'plugin chip' <<<"$text"; then fail "the installed device's plugin does not wait: $text"; fi
expect "new-backend --device: the installed device is found" '-> *vendor.chip' "$("$te_fl" explain relu --dtype f32 --device ext:chip:0)"
unset TE_FL_PLUGIN_PATH

refused() { # PATTERN ARGUMENTS...
  local pattern=$1 text; shift
  if text=$("$te_fl" new-backend "$@" 2>&1); then fail "new-backend $*: accepted"; fi
  expect "new-backend $* is refused" "$pattern" "$text"
}
refused 'must be a lower case letter' Acme somewhere
refused 'must be a lower case letter' ../acme somewhere
refused 'is taken by te-fl' cpu somewhere
refused 'exists already' acme acme
refused 'was not written' acme /proc/acme
[ ! -e somewhere ] || fail "a refused name left a folder"
echo "passed"
