# Sourced by tools/test.sh: compares the time of each stage with the table in CONTRIBUTING.md.

# Prints a line for each stage that took more than 1.5 times its time without a cache in the table of FILE. The limit is five seconds
# higher, because the time of short stages varies by more than that factor. Also prints a line for each stage that the table lacks.
te_fl_slow_stages() { # FILE "NAME SECONDS"...
  local file=$1
  shift
  printf '%s\n' "$@" | awk -v file="$file" -F ' ' '
    BEGIN {
      while ((getline line < file) > 0) {
        if (line ~ /^\| stage \|/) table = 1
        else if (line !~ /^\|/) table = 0
        if (table && split(line, cell, /[ ]*\|[ ]*/) > 2 && cell[3] ~ /^[0-9]+$/) cold[cell[2]] = cell[3]
      }
    }
    !($1 in cold) { printf "%s is not in the table of stages in %s: add what it takes\n", $1, file; next }
    $2 > 1.5 * cold[$1] && $2 > cold[$1] + 5 {
      printf "%s took %d s, %.1f times the %d s that %s has for it on two idle cores with no cache\n", $1, $2, $2 / cold[$1], cold[$1], file
    }'
}
