#include <cstdio>

#include "commands.hpp"
#include "output.hpp"

namespace te_fl_tool {
namespace {

// Scripts, not C++.
// clang-format off
constexpr const char* kBash = R"sh(# te-fl completion for bash: source <(te-fl completion bash)
_te_fl() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} cmd=${COMP_WORDS[1]}
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "info ops explain env doctor bench check new-backend replay fingerprint tune completion --help --version" -- "$cur")); return
  fi
  case "$prev" in
    --dtype) COMPREPLY=($(compgen -W "f32 f16 bf16 f8e4m3 f8e5m2" -- "$cur")); return ;;
    --scaling) COMPREPLY=($(compgen -W "none tensor block1x128 block128x128 mxfp8 nvfp4" -- "$cur")); return ;;
    --set) COMPREPLY=($(compgen -S = -W "$(te-fl env --json 2>/dev/null | sed -n 's/.*"name": "\(.*\)".*/\1/p')" -- "$cur")); return ;;
  esac
  case "$cmd" in
    explain) COMPREPLY=($(compgen -W "$(te-fl ops --names 2>/dev/null) --device --dtype --scaling --set --json --help" -- "$cur")) ;;
    bench) COMPREPLY=($(compgen -W "$(te-fl ops --names 2>/dev/null) --device --impl --dtype --case --shape --peak --seconds --list --json --help" -- "$cur")) ;;
    check) COMPREPLY=($(compgen -f -W "--builtin --op --family --impl --device --case --seed --quick --time-limit --jobs --json --junit --html --help" -- "$cur")) ;;
    new-backend) COMPREPLY=($(compgen -d -- "$cur")) ;;
    ops) COMPREPLY=($(compgen -W "--json --names --help" -- "$cur")) ;;
    env) COMPREPLY=($(compgen -W "--json --markdown --help" -- "$cur")) ;;
    fingerprint) COMPREPLY=($(compgen -f -W "diff" -- "$cur")) ;;
    tune) COMPREPLY=($(compgen -f -W "--out --seconds --help" -- "$cur")) ;;
    replay) COMPREPLY=($(compgen -f -W "--impl --device --json --help" -- "$cur")) ;;
    completion) COMPREPLY=($(compgen -W "bash zsh fish" -- "$cur")) ;;
    *) COMPREPLY=($(compgen -W "--json --help" -- "$cur")) ;;
    esac
    }
complete -F _te_fl te-fl
)sh";

constexpr const char* kZsh = R"sh(#compdef te-fl
# te-fl completion for zsh: te-fl completion zsh > "${fpath[1]}/_te-fl"
_te_fl() {
  local -a commands=(info ops explain env doctor bench check new-backend replay fingerprint tune completion)
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  case ${words[2]} in
    explain) _arguments '--device[device]:device:' '*--dtype[dtype]:dtype:(f32 f16 bf16 f8e4m3 f8e5m2)' \
      '*--scaling[scaling mode]:mode:(none tensor block1x128 block128x128 mxfp8 nvfp4)' '*--set[VAR=VALUE]:setting:' \
      '--json' '*:op:($(te-fl ops --names 2>/dev/null))' ;;
    bench) _arguments '--device[device]:device:' '*--impl[implementation]:id:' '--dtype[dtype]:dtype:(f32 bf16 fp8)' \
      '--case[part of a case]:case:' '--shape[extents]:shape:' '--peak[TFLOP/s]:peak:' '--seconds[per row]:seconds:' \
      '--list' '--json' '*:op:($(te-fl ops --names 2>/dev/null))' ;;
    check) _arguments '--builtin[backend]:name:(cpu reference)' '--op[op]:op:($(te-fl ops --names 2>/dev/null))' \
      '--family[family]:family:' '--impl[implementation]:id:' '--device[device]:device:' '--case[part of a case]:case:' \
      '--seed[of drawn cases]:seed:' '--quick' '--time-limit[seconds]:seconds:' '--jobs[children]:jobs:' \
      '--json[file]:file:_files' '--junit[file]:file:_files' '--html[file]:file:_files' '*:plugin:_files' ;;
    new-backend) _arguments ':name:' ':folder:_files -/' ;;
    ops) _arguments '--json' '--names' ;;
    env) _arguments '--json' '--markdown' ;;
    fingerprint) _arguments '1:command:(diff)' '*:file:_files' ;;
    tune) _arguments '--out[policy file]:file:_files' '--seconds[per call]:seconds:' '*:file:_files' ;;
    replay) _arguments '--impl[implementation]:id:' '--device[device]:device:' '--json' '*:file:_files' ;;
    completion) _values shell bash zsh fish ;;
    *) _arguments '--json' ;;
  esac
}
_te_fl "$@"
)sh";

constexpr const char* kFish =
    R"sh(# te-fl completion for fish: te-fl completion fish > ~/.config/fish/completions/te-fl.fish
complete -c te-fl -f -n __fish_use_subcommand -a 'info ops explain env doctor bench check new-backend replay fingerprint tune completion'
complete -c te-fl -f -n '__fish_seen_subcommand_from explain' -a '(te-fl ops --names 2>/dev/null)'
complete -c te-fl -n '__fish_seen_subcommand_from explain' -l dtype -xa 'f32 f16 bf16 f8e4m3 f8e5m2'
complete -c te-fl -n '__fish_seen_subcommand_from explain' -l scaling -xa 'none tensor block1x128 block128x128 mxfp8 nvfp4'
complete -c te-fl -n '__fish_seen_subcommand_from explain' -l device -x
complete -c te-fl -n '__fish_seen_subcommand_from explain' -l set -x
complete -c te-fl -f -n '__fish_seen_subcommand_from bench' -a '(te-fl ops --names 2>/dev/null)'
complete -c te-fl -n '__fish_seen_subcommand_from replay' -F
complete -c te-fl -n '__fish_seen_subcommand_from replay' -l impl -x
complete -c te-fl -n '__fish_seen_subcommand_from replay' -l device -x
complete -c te-fl -n '__fish_seen_subcommand_from bench' -l dtype -xa 'f32 bf16 fp8'
complete -c te-fl -n '__fish_seen_subcommand_from bench' -l device -x
complete -c te-fl -n '__fish_seen_subcommand_from bench' -l impl -x
complete -c te-fl -n '__fish_seen_subcommand_from bench' -l case -x
complete -c te-fl -n '__fish_seen_subcommand_from bench' -l shape -x
complete -c te-fl -n '__fish_seen_subcommand_from bench' -l peak -x
complete -c te-fl -n '__fish_seen_subcommand_from bench' -l seconds -x
complete -c te-fl -n '__fish_seen_subcommand_from bench' -l list
complete -c te-fl -F -n '__fish_seen_subcommand_from check'
complete -c te-fl -n '__fish_seen_subcommand_from check' -l builtin -xa 'cpu reference'
complete -c te-fl -n '__fish_seen_subcommand_from check' -l op -xa '(te-fl ops --names 2>/dev/null)'
complete -c te-fl -n '__fish_seen_subcommand_from check' -l impl -x
complete -c te-fl -n '__fish_seen_subcommand_from check' -l case -x
complete -c te-fl -n '__fish_seen_subcommand_from check' -l seed -x
complete -c te-fl -n '__fish_seen_subcommand_from check' -l quick
complete -c te-fl -n '__fish_seen_subcommand_from check' -l time-limit -x
complete -c te-fl -n '__fish_seen_subcommand_from check' -l junit -r
complete -c te-fl -n '__fish_seen_subcommand_from check' -l html -r
complete -c te-fl -n '__fish_seen_subcommand_from info ops explain env doctor bench' -l json
complete -c te-fl -f -n '__fish_seen_subcommand_from completion' -a 'bash zsh fish'
)sh";

// clang-format on

}  // namespace

int completion(const std::string& shell) {
  const char* script = shell == "bash" ? kBash : shell == "zsh" ? kZsh : kFish;
  std::fputs(script, stdout);
  return kSuccess;
}

}  // namespace te_fl_tool
