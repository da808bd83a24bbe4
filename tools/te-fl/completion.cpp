// The completion scripts for the shells. They call `te-fl __complete` (complete.cpp). The first
// line of that command's output says what follows: words, or a request to complete files or
// folders.
#include <cstdio>

#include "commands.hpp"
#include "conformance/check/output.hpp"

namespace te_fl_tool {
namespace {

// The strings are shell scripts.
// clang-format off
constexpr const char* kBash = R"sh(# te-fl completion for bash: source <(te-fl completion bash)
_te_fl() {
  local line=${COMP_LINE:0:COMP_POINT} words out current before
  read -ra words <<<"$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  current=${words[-1]}
  mapfile -t out < <(te-fl __complete "${words[@]:1}" 2>/dev/null)
  case ${out[0]} in
    files) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$current") ;;
    folders) compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -d -- "$current") ;;
    *)
      # bash replaces what follows the last = or : only.
      before=${current%"${current##*[=:]}"}
      COMPREPLY=("${out[@]:1}")
      COMPREPLY=("${COMPREPLY[@]#"$before"}")
      [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
      ;;
  esac
  return 0
}
complete -F _te_fl te-fl
)sh";

constexpr const char* kZsh = R"sh(#compdef te-fl
# te-fl completion for zsh: te-fl completion zsh > "${fpath[1]}/_te-fl"
_te_fl() {
  local -a out
  out=("${(@f)$(te-fl __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  case $out[1] in
    files) _files ;;
    folders) _files -/ ;;
    *) (( $#out > 1 )) && compadd -- "${(@)out[2,-1]}" ;;
  esac
}
_te_fl "$@"
)sh";

constexpr const char* kFish = R"sh(# te-fl completion for fish: te-fl completion fish > ~/.config/fish/completions/te-fl.fish
function __te_fl_complete
  set -l words (commandline -opc) (commandline -ct)
  set -l out (te-fl __complete $words[2..-1] 2>/dev/null)
  switch "$out[1]"
    case files
      __fish_complete_path (commandline -ct)
    case folders
      __fish_complete_directories (commandline -ct)
    case '*'
      string join \n $out[2..-1]
  end
end
complete -c te-fl -f -a '(__te_fl_complete)'
)sh";
// clang-format on

}  // namespace

int completion(const std::string& shell) {
  const char* script = shell == "bash" ? kBash : shell == "zsh" ? kZsh : kFish;
  std::fputs(script, stdout);
  return kSuccess;
}

}  // namespace te_fl_tool
