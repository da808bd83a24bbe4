#!/usr/bin/env bash
# Puts the default training text, the Jargon File (public domain, 1.7 MB of English prose), at build/data/text.txt.
# The text comes from the Debian/Ubuntu package jargon-text, which is downloaded and unpacked but not installed. Without
# network the script uses the machine's own licence texts (0.3 MB; the model then learns legal English).
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/data/text.txt
[ -s "$out" ] && { echo "text: $out is there"; exit 0; }
mkdir -p build/data
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if (cd "$work" && apt-get download -qq jargon-text >log 2>&1 || { [ "$(id -u)" = 0 ] && apt-get update -qq >>log 2>&1 &&
  apt-get download -qq jargon-text >>log 2>&1; }) && dpkg-deb -x "$work"/jargon-text_*.deb "$work/x"; then
  gunzip -c "$work"/x/usr/share/doc/jargon-text/jargon.txt.gz >"$out.part"
  echo "text: the Jargon File, from the package jargon-text"
else
  echo "text: apt-get download jargon-text failed ($(tail -n1 "$work/log" 2>/dev/null)); using /usr/share/common-licenses" >&2
  find /usr/share/common-licenses -type f | sort | xargs cat >"$out.part"
fi
mv "$out.part" "$out"
echo "text: $out, $(stat -c %s "$out") bytes"
