#!/usr/bin/env bash
# Checks the CUDA plugin on a machine with a GPU; needs no network. Runs the whole conformance table on the GPU, tensors of more than
# 2^31 elements (40 GiB of it), bad input and broken devices, the compute-sanitizer tools on a reduced table, the example with every
# recipe and on copies in host memory, and the benchmarks of bench/gpu if a Python with PyTorch is found; prints a table last.
# Tests of cuDNN run with every cuDNN 9 of the machine: the one that the dynamic loader finds, and a different one in Python's packages.
# usage: tools/gpu_check.sh [--build DIR] [--out DIR] [--text FILE] [--python PATH] [--gemm-choices FILE] [--no-bench | --quick | --staged]
#   --build DIR  a build tree, or a folder with its bin/{conformance,conformance_huge,train_gpt,nn_graphed_step_test,gpu_errors_test,gpu_collectives_test,bench_collectives},
#                lib/libte_fl_bench_gpu.so and plugins/libte_fl_cuda.so
#                (default build/release; built if it is missing and cmake and nvcc exist)
#   --out DIR    where logs and gpu_check.json go (default build/gpu_check)
#   --text FILE  the example's training text (default build/data/text.txt, from tools/fetch_text.sh)
#   --python PATH  a Python with PyTorch and CUDA, for the benchmarks (default: python3, if it has them)
#   --gemm-choices FILE  measured choices of GEMM algorithms (bench/gpu/tune_gemm.py) for the benchmarks; other parts ignore them
#   --no-bench   everything except the benchmarks
#   --quick      only conformance, errors and bad input, and collectives
#   --staged     only ops that run on copies in host memory
set -uo pipefail
cd "$(dirname "$0")/.."
build=build/release out=build/gpu_check text_file=build/data/text.txt python= choices= quick=0 staged_only=0 bench=1
while [ $# -gt 0 ]; do
  case "$1" in
    --build | --out | --text | --python | --gemm-choices)
      [ $# -ge 2 ] || { echo "gpu_check.sh: $1 wants a path" >&2; exit 2; }
      case "$1" in --build) build=$2 ;; --out) out=$2 ;; --python) python=$2 ;; --gemm-choices) choices=$2 ;; *) text_file=$2 ;; esac
      shift 2 ;;
    --quick) quick=1; shift ;;
    --no-bench) bench=0; shift ;;
    --staged) staged_only=1; shift ;;
    -h | --help) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu_check.sh: unknown argument '$1'; known: --build, --out, --text, --python, --gemm-choices, --no-bench, --quick, --staged, --help" >&2; exit 2 ;;
  esac
done
if [ -n "$choices" ]; then
  if [ ! -f "$choices" ] || [ ! -r "$choices" ]; then
    echo "gpu_check.sh: --gemm-choices: $choices cannot be read; name a file that bench/gpu/tune_gemm.py has written, or leave it out" >&2
    exit 2
  fi
  choices=$(realpath "$choices")
fi
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "gpu_check.sh: no NVIDIA GPU here (nvidia-smi shows none); run it where there is one" >&2
  exit 1
fi
begun=$(date +%s)
if [ ! -x "$build/bin/conformance" ] || [ ! -e "$build/plugins/libte_fl_cuda.so" ]; then
  echo "gpu_check.sh: $build has no bin/conformance and plugins/libte_fl_cuda.so; building"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTE_FL_CUDA=ON &&
    cmake --build "$build" --target conformance train_gpt conformance_huge nn_graphed_step_test gpu_errors_test gpu_collectives_test bench_collectives te_fl_bench_gpu te_fl_cuda || exit 1
fi
mkdir -p "$out"
rm -f "$out"/*.code
plugin=$(realpath "$build/plugins/libte_fl_cuda.so")
build=$(realpath "$build")
export LD_LIBRARY_PATH="$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" TE_FL_PLUGIN_PATH=
device=$(nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader | head -1)
rows=() failures=0
row() { # NAME RESULT DETAIL
  rows+=("$(printf '%-34s %-7s %s' "$1" "$2" "$3")")
  case "$2" in passed | absent | below) ;; *) failures=$((failures + 1)) ;; esac
}
# Lists the folders of this machine's cuDNNs, each library once. The first is the one that the loader finds without further settings; empty if none.
cudnn_folders=("")
find_cudnns() {
  local found folder file seen=" "
  found=$(ldconfig -p 2>/dev/null | awk '$1 == "libcudnn.so.9" { print $NF; exit }')
  local in_order=()
  IFS=: read -ra in_order <<<"${LD_LIBRARY_PATH:-}"
  in_order+=("$([ -z "$found" ] || dirname "$found")" /usr/local/cuda/lib64)
  for folder in "${in_order[@]}"; do
    [ -n "$folder" ] && [ -e "$folder/libcudnn.so.9" ] || continue
    cudnn_folders=("$folder")
    seen=" $(realpath "$folder/libcudnn.so.9") "
    break
  done
  for folder in $("${python:-python3}" -c 'import nvidia.cudnn as found; print(*(path + "/lib" for path in found.__path__))' 2>/dev/null); do
    [ -e "$folder/libcudnn.so.9" ] || continue
    file=$(realpath "$folder/libcudnn.so.9")
    [[ "$seen" != *" $file "* ]] || continue
    seen="$seen$file "
    cudnn_folders+=("$folder")
  done
}
find_cudnns
# with_cudnn I COMMAND..: runs the command with the I-th cuDNN before others in the library path. At log level INFO the plugin logs its version.
with_cudnn() {
  local folder=${cudnn_folders[$1]}
  env TEFL_LOG_LEVEL=INFO LD_LIBRARY_PATH="$build/lib${folder:+:$folder}:$LD_LIBRARY_PATH" "${@:2}"
}
# Prints "cuDNN 9.14.0" as the plugin logged it when it opened the library; the folder of a cuDNN that the plugin never opened.
cudnn_name() { # LOG I
  local said
  said=$(grep -Eo 'cuDNN [0-9]+\.[0-9]+\.[0-9]+ \(' "$1" | head -n 1)
  echo "${said:-cuDNN of ${cudnn_folders[$2]:-no folder} (}" | sed 's/ ($//'
}
conformance=("$build/bin/conformance" --plugin "$plugin" --device cuda:0 --impl vendor.cuda
  --expected conformance/expected_unsupported.txt)

# Families of ops, the slowest first. collective is missing because gpu_collectives_test runs it.
all_families="gemm moe activation attention quantize softmax norm tensor rope optimizer dropout"
# Runs a command in the background, for commands that are bound by the host or leave most of the GPU idle. start NAME COMMAND.. writes
# $out/NAME.log; $out/NAME.code, the exit code, exists once `wait` returns.
room=$(($(nproc) / 2))
[ $room -ge 4 ] || room=4
[ $room -le 10 ] || room=10
start() {
  while [ "$(jobs -rp | wc -l)" -ge $room ]; do wait -n; done
  { "${@:2}" >"$out/$1.log" 2>&1; echo $? >"$out/$1.code"; } &
}
code_of() { cat "$out/$1.code" 2>/dev/null || echo none; }
result_of() { [ "$(code_of "$1")" = 0 ] && echo passed || echo FAILED; }
has() { # ROW PROGRAM: whether it is there; if not, the row says what to build
  [ ! -x "$build/bin/$2" ] || return 0
  row "$1" FAILED "$build/bin/$2 is missing; build the target $2"
  return 1
}

small_training() { # LOG [SETTING]: three steps of a small model
  env ${2:+"$2"} TE_FL_PLUGIN_MODULES="$plugin" "$build/bin/train_gpt" --device cuda:0 --style gpt --dtype f32 --hidden 128 --layers 2 --heads 8 --lr 0.0015 --steps 3 --batch 4 --seq-len 64 \
    --eval-batches 1 --sample-bytes 0 --data "$text_file" >"$1" 2>&1
}
losses() { awk '/^step / { for (i = 1; i < NF; ++i) if ($i == "loss") print $(i + 1) } /^validation loss / { print $3 }' "$1"; }
# Prints the largest relative difference of two runs' losses; "none" if a loss is missing or not a number.
losses_apart() {
  paste <(losses "$1") <(losses "$2") | awk '
    NF != 2 || $1 !~ /^[0-9.]+$/ || $2 !~ /^[0-9.]+$/ || $2 == 0 { wrong = 1; next }
    { apart = $1 > $2 ? $1 / $2 - 1 : $2 / $1 - 1; if (apart > most) most = apart; ++count }
    END { if (wrong || count < 3) print "none"; else printf "%.5f\n", most }'
}
# The losses of the first steps and of the validation are the same on host and GPU, except for ties of FP8 rounding: up to 0.01 % was seen.
losses_bound=0.001
staged() { # SETTING PATTERN_OF_STAGED_ROWS PATTERN_OF_NATIVE_ROWS: every row of the closing table is one of the two, and both occur
  local log="$out/staged-${1%%=*}.log" rows_said others apart
  small_training "$log" "$1" || { row "$1" FAILED "$(tail -n 1 "$log")"; return; }
  rows_said=$(sed -n '/Implementations that ran/,/staged to the host/p' "$log" | grep -E ' (default|reference|vendor)\.')
  others=$(printf '%s\n' "$rows_said" | grep -Evc "$2|$3")
  if ! printf '%s\n' "$rows_said" | grep -Eq "$2" || [ "$others" != 0 ]; then
    row "$1" FAILED "$others rows are neither, see $log"
    return
  fi
  apart=$(losses_apart "$log" "$out/staged-nothing.log")
  if [ "$apart" = none ] || awk "BEGIN {exit !($apart > $losses_bound)}"; then
    row "$1" FAILED "losses are $apart of an unstaged run's apart, at most $losses_bound; see $log and $out/staged-nothing.log"
  else
    row "$1" passed "$(grep 'staged to the host' "$log"); losses within $apart of an unstaged run's (at most $losses_bound)"
  fi
}
# Ops on copies in host memory: the reference backend on the first quarter of the table, and training under the default policy.
start_staged_conformance() {
  start conformance-staged "$build/bin/conformance" --plugin "$plugin" --device cuda:0 --impl reference.host --reduced \
    --expected conformance/expected_unsupported.txt
}
check_staging() {
  row "conformance reference.host, staged" "$(result_of conformance-staged)" "$(tail -n 1 "$out/conformance-staged.log")"
  has "training on copies" train_gpt || return
  small_training "$out/staged-nothing.log" || { row "training on copies" FAILED "$(tail -n 1 "$out/staged-nothing.log")"; return; }
  number='[0-9]+ +[0-9]+ +[0-9.]+ +[0-9.]+ +[0-9.]+$'  # calls, staged, MiB, copying ms, waiting ms
  staged TE_FL_PREFER=reference "reference\.host +$number" '^$'
  staged TE_FL_DENY_VENDORS=nvidia "(default\.cpu|reference\.host) +$number" '^$'
  staged TE_FL_PER_OP=layernorm_fwd=reference "layernorm_fwd +reference\.host +$number" 'vendor\.cuda[.a-z]* +[0-9]+$'
}
# Tensors of more than 2^31 elements: all cases must pass, and all must run on this plugin.
check_huge() { # ROW NAME I
  has "$1" conformance_huge || return
  local lines others
  lines=$(grep -Ec ' (passed|FAILED) +[0-9.]+ s ' "$out/$2.log")
  others=$(grep -E ' (passed|FAILED) +[0-9.]+ s ' "$out/$2.log" | grep -Evc ' vendor\.cuda[.a-z+]* +passed ')
  row "$1" "$([ "$(code_of "$2")" = 0 ] && [ "$lines" -gt 0 ] && [ "$others" = 0 ] && echo passed || echo FAILED)" \
    "$(tail -n 1 "$out/$2.log"); $others of $lines failed or elsewhere; $(cudnn_name "$out/$2.log" "$3")"
}
# Compares captured steps with eager steps.
check_graphs() { # ROW NAME I
  has "$1" nn_graphed_step_test || return
  with_cudnn "$3" env GRAPHED_STEP_DEVICE=cuda:0 TE_FL_PLUGIN_MODULES="$plugin" "$build/bin/nn_graphed_step_test" \
    --gtest_filter='GraphedStepsOnADevice*' >"$out/$2.log" 2>&1
  echo $? >"$out/$2.code"
  row "$1" "$(result_of "$2")" "$(tail -n 1 "$out/$2.log"); $(cudnn_name "$out/$2.log" "$3")"
}

cudnn=("${conformance[@]/%vendor.cuda/vendor.cuda.cudnn}" --family attention --reduced) has_cudnn=1

if [ $staged_only = 1 ]; then
  quick=1
  start_staged_conformance
  wait
  check_staging
else
  # The slowest first.
  [ $quick = 1 ] || [ ! -x "$build/bin/conformance_huge" ] ||
    start huge with_cudnn 0 "$build/bin/conformance_huge" --device cuda:0 --plugin "$plugin" --impl vendor.cuda
  for i in "${!cudnn_folders[@]}"; do
    start "conformance-cudnn$i" with_cudnn "$i" "${conformance[@]/%vendor.cuda/vendor.cuda.cudnn}" --family attention \
      --json "$out/conformance-cudnn$i.json"
  done
  start conformance-no-scratch env TE_FL_CUDA_ATTENTION_SCRATCH_MB=0 "${conformance[@]}" --op fused_attn_bwd
  for family in $all_families; do
    start "conformance-$family" "${conformance[@]}" --family $family --json "$out/conformance-$family.json"
  done
  wait
  for family in $all_families; do
    row "conformance $family" "$(result_of "conformance-$family")" "$(tail -n 1 "$out/conformance-$family.log")"
  done
  row "attention without scratch" "$(result_of conformance-no-scratch)" "$(tail -n 1 "$out/conformance-no-scratch.log")"
  for i in "${!cudnn_folders[@]}"; do
    name=conformance-cudnn$i
    if grep -q "vendor.cuda.cudnn .*: cuDNN was not found" "$out/$name.log"; then
      row "attention on cuDNN" absent "cuDNN was not found; attention runs in the plain kernels"
      [ "$i" != 0 ] || has_cudnn=0
    else
      row "attention on $(cudnn_name "$out/$name.log" "$i")" "$(result_of "$name")" "$(tail -n 1 "$out/$name.log")"
    fi
  done
  if [ $quick = 0 ]; then
    check_huge "more than 2^31 elements" huge 0
    # One at a time, since two do not fit into the memory of some GPUs.
    for i in "${!cudnn_folders[@]}"; do
      [ "$i" != 0 ] && [ -x "$build/bin/conformance_huge" ] || continue
      start "huge-cudnn$i" with_cudnn "$i" "$build/bin/conformance_huge" --device cuda:0 --plugin "$plugin" --impl vendor.cuda --op fused_attn_fwd
      wait
      check_huge "attention, 2^31, $(cudnn_name "$out/conformance-cudnn$i.log" "$i")" "huge-cudnn$i" "$i"
    done
  fi

  # Bad input, out of memory, and devices that break; needs a GPU, so ctest does not run it.
  if has "errors and bad input" gpu_errors_test; then
    TE_FL_PLUGIN_MODULES=$plugin "$build/bin/gpu_errors_test" >"$out/errors.log" 2>&1
    echo $? >"$out/errors.code"
    row "errors and bad input" "$(result_of errors)" "$(grep -E '^\[  (PASSED|FAILED|SKIPPED) ' "$out/errors.log" | head -n 2 | tr '\n' ' ')"
  fi
  if has "collectives" gpu_collectives_test; then # two ranks where there are two GPUs; NVLink's multicast stays off
    NCCL_NVLS_ENABLE=0 TE_FL_PLUGIN_MODULES=$plugin "$build/bin/gpu_collectives_test" >"$out/collectives.log" 2>&1
    echo $? >"$out/collectives.code"
    row "collectives" "$(result_of collectives)" "$(grep -E '^\[  (PASSED|FAILED|SKIPPED) ' "$out/collectives.log" | head -n 2 | tr '\n' ' ')"
  fi
  # Enables every check: pointers and streams before each op, a synchronisation after it, a profiler range around it.
  for family in $all_families; do
    start "validate-$family" env TE_FL_VALIDATE=1 TE_FL_SYNC=1 TE_FL_CUDA_NVTX=1 "${conformance[@]}" --reduced --family $family
  done
fi

# start_sanitizer TOOL NAME ARGUMENTS..: starts conformance under a tool of compute-sanitizer; writes $out/TOOL-NAME.*.
tool_options=()
start_sanitizer() {
  # The tool sees individual allocations only if te-fl does not cache freed ones.
  start "$1-$2" env TE_FL_DEVICE_CACHE_MB=0 "$sanitizer" --tool "$1" ${tool_options[@]+"${tool_options[@]}"} --error-exitcode 99 "${@:3}"
}
if [ $quick = 0 ]; then
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
  if [ -n "$sanitizer" ]; then
    # A quarter of the table, and products of sizes that the plugin's own kernels run.
    joined=("${conformance[@]}" --family gemm --case 512x17664x128)
    start_sanitizer racecheck joined-gemm "${joined[@]}"
    for tool in racecheck memcheck initcheck; do
      for family in ${all_families/gemm/}; do
        start_sanitizer $tool $family "${conformance[@]}" --reduced --family $family
      done
    done
    # NCCL queries kernels that its library may lack and handles the error; under the tool it starts slowly.
    tool_options=(--report-api-errors no)
    [ ! -x "$build/bin/gpu_collectives_test" ] || start_sanitizer memcheck collectives env NCCL_NVLS_ENABLE=0 TE_FL_COMM_TIMEOUT_MS=120000 \
      TE_FL_PLUGIN_MODULES="$plugin" "$build/bin/gpu_collectives_test" --gtest_filter='GpuCollectives.*-*Times*:*32BitsCount*'
    tool_options=()
    start_sanitizer racecheck attention-no-scratch env TE_FL_CUDA_ATTENTION_SCRATCH_MB=0 "${conformance[@]}" --reduced --op fused_attn_bwd
    start_sanitizer racecheck gemm "${conformance[@]}" --reduced --family gemm
    start_sanitizer memcheck gemm "${conformance[@]}" --reduced --family gemm
    start_sanitizer memcheck joined-gemm "${joined[@]}"
    # cuBLASLt stores products of 16-bit and FP8 operands by TMA. initcheck does not track TMA stores, so it reports every element of
    # such a product when te-fl's epilogue reads it, although the results are right. Products of F32 operands are tracked.
    start_sanitizer initcheck gemm-f32 "${conformance[@]}" --reduced --family gemm --case 'generic_gemm/f32*f32->'
    # With cuDNN's attention only te-fl's own kernels are checked, because both tools report errors in cuDNN's kernels.
    if [ $has_cudnn = 1 ]; then
      start_sanitizer memcheck cudnn "${cudnn[@]}"
      tool_options=(--kernel-name kernel_substring=te_fl)
      start_sanitizer racecheck cudnn "${cudnn[@]}"
      start_sanitizer initcheck cudnn "${cudnn[@]}"
      tool_options=()
    fi
  fi
  start_staged_conformance
fi
wait

if [ $staged_only = 0 ]; then
  failed=
  for family in $all_families; do [ "$(code_of "validate-$family")" = 0 ] || failed="$failed $family"; done
  row "TE_FL_VALIDATE, _SYNC and _NVTX" "$([ -z "$failed" ] && echo passed || echo FAILED)" "${failed:-reduced table, every family}"
fi

if [ $quick = 0 ]; then
  for tool in memcheck racecheck initcheck; do
    if [ -z "$sanitizer" ]; then
      row "compute-sanitizer $tool" FAILED "compute-sanitizer was not found; it comes with the CUDA Toolkit"
      continue
    fi
    parts=$all_families said="every family"
    [ $tool != initcheck ] || parts="${parts/gemm/gemm-f32}" said="every family, of gemm products of F32"
    [ $tool = initcheck ] || parts="$parts joined-gemm"
    [ $tool != racecheck ] || parts="$parts attention-no-scratch"
    [ $has_cudnn = 0 ] || parts="$parts cudnn" said="$said, and around cuDNN"
    failed=
    for part in $parts; do  # requires: no report of the tool, no failed case, and at least one case
      grep -Eq "ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards" "$out/$tool-$part.log" && [ "$(code_of $tool-$part)" = 0 ] &&
        grep -Eq '^[1-9][0-9]* passed, 0 failed' "$out/$tool-$part.log" || failed="$failed $part"
    done
    row "compute-sanitizer $tool" "$([ -z "$failed" ] && echo passed || echo FAILED)" "${failed:-reduced table, $said}"
  done
  if [ -n "$sanitizer" ] && has "collectives under memcheck" gpu_collectives_test; then
    row "collectives under memcheck" "$([ "$(code_of memcheck-collectives)" = 0 ] && grep -q 'ERROR SUMMARY: 0 errors' "$out/memcheck-collectives.log" &&
      grep -q '^\[  PASSED  \]' "$out/memcheck-collectives.log" && echo passed || echo FAILED)" \
      "NCCL with one rank; $(grep -E '^\[  (PASSED|FAILED) ' "$out/memcheck-collectives.log" | head -n 1)"
  fi
  check_staging
  check_graphs "captured steps, bit by bit" graphs 0
  for i in "${!cudnn_folders[@]}"; do
    [ "$i" = 0 ] || check_graphs "captured steps, $(cudnn_name "$out/conformance-cudnn$i.log" "$i")" "graphs-cudnn$i" "$i"
  done
  for recipe in none delayed current block; do
    has "train_gpt $recipe" train_gpt || continue
    if TE_FL_PLUGIN_MODULES=$plugin "$build/bin/train_gpt" --device cuda:0 --recipe $recipe --sample-bytes 0 \
      --data "$text_file" >"$out/train-$recipe.log" 2>&1; then
      others=$(sed -n '/Implementations that ran/,$p' "$out/train-$recipe.log" | grep -E ' (default|reference)\.' | wc -l)
      grep -q 'staged to the host: none' "$out/train-$recipe.log" || others="$others staged and $others"
      row "train_gpt $recipe" "$([ "$others" = 0 ] && echo passed || echo FAILED)" \
        "$(grep -E '^validation loss' "$out/train-$recipe.log"); $(grep -E '^trained' "$out/train-$recipe.log"); $others ops elsewhere"
    else
      row "train_gpt $recipe" FAILED "$(tail -n 1 "$out/train-$recipe.log")"
    fi
  done
fi

# Figures below their targets are printed without failing the check, because they depend on the machine.
if [ $quick = 0 ] && [ $bench = 1 ]; then
  if has "benchmarks: collectives" bench_collectives; then # of one rank: what a call costs on the host beyond NCCL's own
    if TE_FL_PLUGIN_MODULES=$plugin "$build/bin/bench_collectives" --device cuda --rounds 51 --json "$out/bench_collectives.json" \
      >"$out/bench_collectives.log" 2>&1; then
      of_all=$(grep -Ec '^[a-z_]+ +[0-9]+ ' "$out/bench_collectives.log")
      met=$(awk '$1 ~ /^[a-z_]+$/ && $2 ~ /^[0-9]+$/ && $8 <= 1 { ++n } END { print n + 0 }' "$out/bench_collectives.log")
      row "benchmarks: collectives" "$([ "$met" = "$of_all" ] && echo passed || echo below)" "$met of $of_all within 1 us of NCCL on the host"
    else
      row "benchmarks: collectives" FAILED "$(tail -n 1 "$out/bench_collectives.log")"
    fi
  fi
  has_torch() { "$1" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; }
  if [ -n "$python" ]; then
    has_torch "$python" || { row "benchmarks" FAILED "--python: $python finds no PyTorch with CUDA"; python=none; }
  else
    has_torch python3 && python=python3
  fi
  if [ -z "$python" ]; then
    row "benchmarks" absent "python3 has no PyTorch with CUDA; pip install torch, or name another with --python"
  elif [ "$python" = none ]; then
    :
  elif [ ! -e "$build/lib/libte_fl_bench_gpu.so" ]; then
    row "benchmarks" FAILED "$build/lib/libte_fl_bench_gpu.so is missing; build the target te_fl_bench_gpu"
  else
    taken=()
    [ -z "$choices" ] || taken=("TE_FL_CUDA_GEMM_FILE=$choices")
    env ${taken[@]+"${taken[@]}"} "$python" bench/gpu/bench_gpu.py --build "$build" --json "$out/bench_gpu.json" >"$out/bench_gpu.log" 2>&1 ||
      row "benchmarks" FAILED "$(tail -n 1 "$out/bench_gpu.log")"
    while read -r _ part met of_all rest; do
      of_all=${of_all%;}
      row "benchmarks: $part" "$([ "$met" = "$of_all" ] && echo passed || echo below)" "$met of $of_all targets met${rest:+; $rest}"
    done < <(grep '^targets ' "$out/bench_gpu.log")
    if env ${taken[@]+"${taken[@]}"} "$python" bench/gpu/layer_profile.py --build "$build" --bytes --json "$out/layer_bytes.json" >"$out/layer_bytes.log" 2>&1; then
      moved=$(sed -n 's/^total .*: rest .* \([0-9.]*\) GB$/\1/p' "$out/layer_bytes.log")
      row "layer's bytes, by the profiler" "$(awk "BEGIN {exit !($moved <= 3.3)}" && echo passed || echo below)" \
        "$moved GB outside products and attention; at most 3.3"
      if nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | grep -qx 9.0; then
        row "products with GELU in one kernel" "$(grep -q fused_gemm_kernel "$out/layer_bytes.log" && echo passed || echo FAILED)" \
          "$(grep -c fused_gemm_kernel "$out/layer_bytes.log") in a layer with delayed scaling"
      fi
    else
      row "layer's bytes, by the profiler" absent "$(tail -n 1 "$out/layer_bytes.log")"
    fi
  fi
fi

{
  printf '{"device": "%s", "date": "%s", "commit": "%s", "rows": [\n' "$device" "$(date -u +%F)" "$(git rev-parse --short HEAD 2>/dev/null)"
  for i in "${!rows[@]}"; do
    printf '  "%s"%s\n' "$(printf '%s' "${rows[$i]}" | tr -s ' ' | tr -d '"\\')" "$([ "$i" = $((${#rows[@]} - 1)) ] || echo ,)"
  done
  printf ']}\n'
} >"$out/gpu_check.json"
echo "device: $device; the check took $(($(date +%s) - begun)) s"
printf '%s\n' "${rows[@]}"
[ $failures = 0 ] || { echo "$failures row(s) failed; logs are in $out" >&2; exit 1; }
