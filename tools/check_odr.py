#!/usr/bin/env python3
"""Finds violations of the one-definition rule: types, functions and inline variables of the same namespace that two files of one program define. That
is undefined behaviour because the linker keeps one of them. Prints every clash; exits 1 on any.
usage: tools/check_odr.py [ROOT]     (default: this repository; only tracked files where ROOT is a git tree)

It reads sources, because compiling all of a plugin a second time with -flto -Wodr takes as long as the first time. PROGRAMS lists
the programs. It ignores definitions in unnamed namespaces, static functions and constants, which are local to their
files, and definitions by macros.

In UNITED folders, whose files tools/test.sh compiles as unity builds (te_fl_unite in CMakeLists.txt), the names in unnamed
namespaces must differ too. They must not hide a header's name that another file of the folder uses either: in a unity build that
file would use the nearer name, often without an error."""
import pathlib
import re
import subprocess
import sys

SUFFIXES = (".c", ".cpp", ".h", ".hpp", ".cu", ".cuh")
# Programs and the folders whose files are linked into each; include/ and the tests' helpers belong to each program that can include them.
PROGRAMS = {
    "libte_fl": ["include", "core", "policy", "plugins", "registry", "dispatch", "comm", "nn", "backends/reference", "backends/cpu"],
    "the CUDA plugin": ["include", "backends/cuda"],
    "the OpenCL plugin": ["include", "backends/opencl"],
    "the tool te-fl": ["include", "tools", "conformance", "bench/cases"],
    "the conformance suite": ["include", "bench/cases", "conformance"],
    "the tests of core": ["include", "tests/core", "tests/support"],
    "the tests of policy, registry, plugins and dispatch": ["include", "tests/policy", "tests/registry", "tests/plugins", "tests/dispatch",
                                                            "tests/support"],
    "the tests of the reference": ["include", "tests/backends/reference", "tests/support"],
    "the tests of the CPU backend": ["include", "tests/backends/cpu", "tests/support"],
    "the tests of the CUDA plugin": ["include", "tests/backends/cuda", "tests/support"],
    "the tests of nn": ["include", "tests/nn", "tests/support"],
}
# Each UNITED folder is compiled as one file, including the folders below it except those in APART.
APART = ["conformance/cases"]
UNITED = ["conformance", "core", "policy", "registry", "plugins", "dispatch", "comm", "nn", "backends/reference", "backends/gloo", "backends/cuda", "python/src", "tools/te-fl",
          "examples/train_gpt", "tests/core", "tests/policy", "tests/registry", "tests/plugins", "tests/dispatch", "tests/comm", "tests/nn",
          "tests/backends/reference", "tests/backends/cpu"]
TOKEN = re.compile(r"""
    (?P<raw>R"(?P<delim>[^()\\\s]{0,16})\(.*?\)(?P=delim)")
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<char>(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*')
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
""", re.X | re.S | re.M)
TYPE = re.compile(r"\b(?:struct|class|union|enum(?:\s+(?:class|struct))?)\s+((?:alignas\s*\([^)]*\)\s*|\[\[.*?\]\]\s*|[A-Z_]+\s+(?=\w))*)"
                  r"(\w+(?:\s*::\s*\w+)*(?:\s*<.*>)?)\s*(?:final\s*)?(?::(?!:).*)?$", re.S)


def without_text(source):
    """Returns the source without comments, directives and quoted text; line numbers stay."""
    def blank(match):
        kept = '""' if match.group("string") or match.group("raw") else "' '" if match.group("char") else ""
        return kept + "\n" * match.group(0).count("\n")
    return TOKEN.sub(blank, source)


def closing(text, at, pair):
    """Returns the position of the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    return len(text) - 1


def strip_templates(head):
    """Removes a declaration's leading template<..> and requires clauses; returns the rest and their number."""
    count = 0
    head = head.strip()
    while head.startswith("template"):
        begin = head.find("<")
        if begin < 0:
            break
        head = head[closing(head, begin, "<>") + 1:].strip()
        head = re.sub(r"^requires\s+(?:\([^)]*\)|[\w:]+(?:<[^>]*>)?)(?:\s*(?:&&|\|\|)\s*(?:\([^)]*\)|[\w:]+(?:<[^>]*>)?))*", "", head).strip()
        count += 1
    return head, count


def split_arguments(text):
    """Splits a parameter list at its top-level commas."""
    parts, depth, piece = [], 0, ""
    for c in text:
        depth += (c in "(<[{") - (c in ")>]}")
        if c == "," and depth == 0:
            parts.append(piece)
            piece = ""
        else:
            piece += c
    return [p for p in (*parts, piece) if p.strip()]


def parameter_type(text):
    """Returns a parameter's type without its default, its name and its top-level const."""
    text = re.sub(r"\s*=.*$", "", text, flags=re.S).strip()
    text = re.sub(r"\(\s*([&*]+)\s*\w+\s*\)", r"(\1)", re.sub(r"\s+", " ", text))  # a reference to an array: const T (&x)[8]
    text = re.sub(r"(?<=[\s*&>])(?!(?:const|int|long|short|char|float|double|bool|unsigned|signed|auto|void)\b)\w+(\s*\[[^\]]*\])?$",
                  lambda m: m.group(1) or "", text) if " " in text or text[-1:] not in "*&" else text
    return re.sub(r"\s*([*&<>,:])\s*", r"\1", text.strip())


def first_parenthesis(head):
    """Returns the position of the first "(" outside of template arguments; -1 if there is none."""
    depth = 0
    for i, c in enumerate(head):
        if re.search(r"operator\s*$", head[:i]) and c in "<>(":
            return head.find("(", i)
        depth += (c == "<") - (c == ">" and head[i - 1] != "-")
        if c == "(" and depth <= 0:
            return i
    return -1


def function_key(head):
    """Returns "name(types)" of a function's definition; None if the text is not a function definition."""
    begin = first_parenthesis(head)
    while begin > 0 and re.search(r"(?:\b(?:alignas|decltype|noexcept|explicit|__attribute__|__launch_bounds__|__align__)\s*)$", head[:begin]):
        begin = head.find("(", closing(head, begin, "()") + 1)
    name = re.search(r"((?:~?\w+(?:\s*<[^()]*>)?\s*::\s*)*(?:~?\w+(?:\s*<[^()]*>)?|operator\s*[^\s\w(]+|operator\s*\(\s*\)|operator\s+[\w:&*<> ]+))\s*$", head[:begin])
    if begin <= 0 or name is None:
        return None
    if re.search(r"operator\s*$", head[:begin]):  # operator()(..)
        begin = head.find("(", begin + 1)
    types = [parameter_type(p) for p in split_arguments(head[begin + 1:closing(head, begin, "()")])]
    return re.sub(r"\s+", "", name.group(1)) + "(" + ", ".join(t for t in types if t != "void") + ")"


def definition(head):
    """Returns (kind, name) of the definition that a declaration followed by "{" begins; None if other files cannot see the definition."""
    head, templates = strip_templates(re.sub(r"\[\[.*?\]\]", "", head, flags=re.S))
    if not head:
        return None
    mark = f" (template {templates})" if templates else ""
    paren = first_parenthesis(head)
    words = set(re.findall(r"\w+", head[:paren] if paren >= 0 else head))
    found = TYPE.search(head)
    if found and words & {"struct", "class", "union", "enum"} and (paren < 0 or "alignas" in words or head[:paren].find(":") >= 0) \
            and "operator" not in words:
        return "type", re.sub(r"\s+", "", found.group(2))
    assigned = re.search(r"(?<![=!<>+\-*/|&^])=(?!=)", head)
    if assigned and (paren < 0 or assigned.start() < paren) and "operator" not in words:
        return variable(head)
    if paren < 0:
        return variable(head)
    if words & {"static", "using", "typedef", "concept", "friend", "catch"}:
        return None
    key = function_key(head)
    return ("function", key + mark) if key and not key.startswith("main(") else None


def variable(head):
    """Returns an inline variable. Other variables are local to their file, or the linker reports their clash."""
    head = re.split(r"(?<![=!<>+\-*/|&^])=(?!=)", head, maxsplit=1)[0].strip()
    words = re.findall(r"\w+", head)
    if "inline" not in words or "static" in words or "(" in head:
        return None
    return "variable", words[-1]


def local_variable(head):
    """Returns a variable of an unnamed namespace; None for a declaration that may occur more than once."""
    head = re.sub(r"\balignas\s*\([^)]*\)|\[\[.*?\]\]", "", head, flags=re.S)
    initialised = re.search(r"(?<![=!<>+\-*/|&^])=(?!=)", head)
    before = head[:initialised.start()] if initialised else head
    words = set(re.findall(r"\w+", before))
    if words & {"using", "typedef", "namespace", "extern", "static_assert", "friend", "template", "operator", "catch"}:
        return None
    paren = first_parenthesis(before)
    if paren >= 0 and not words & {"const", "constinit", "constexpr", "thread_local"}:  # a function declaration
        return None
    name = re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", before[:paren] if paren >= 0 else before)
    return ("variable", name.group(1)) if name and len(words) > 1 else None


# reach of a definition: visible to other files; local to each file; in an unnamed namespace
SHARED, CONSTANT, UNNAMED = "shared", "constant", "unnamed"


def all_definitions(source):
    """Lists (namespace, kind, name, line, reach) of a file's definitions in the order of the file; reach is SHARED, CONSTANT or UNNAMED."""
    text = without_text(source)
    scopes, head, head_line, line = [], "", 1, 1
    found = []
    i = 0

    def add(entry, constant):
        if entry is not None:
            reach = UNNAMED if None in scopes else CONSTANT if constant else SHARED
            found.append(("::".join(s for s in scopes if s), *entry, head_line, reach))

    while i < len(text):
        c = text[i]
        if c == "{":
            space = re.search(r"\bnamespace\b\s*((?:inline\s+)?[\w:]*)\s*$", head)
            if head.count("(") > head.count(")"):  # a value among parameters or initialisers
                end = closing(text, i, "{}")
                line += text.count("\n", i, end)
                i = end
            elif space:
                scopes.append(space.group(1) or None)
                head = ""
            elif re.search(r'extern\s*""\s*$', head):
                scopes.append("")
                head = ""
            else:
                defined = definition(head)
                add(defined or local_variable(head), defined is None)
                end = closing(text, i, "{}")
                line += text.count("\n", i, end)
                i = end
                # After a body, the text up to ";" belongs to the definition, except for a function, whose definition ends at the body.
                rest = re.match(r"\s*(?=[;,({.=]|\w+\s*(?:\[[^\]]*\]\s*)?[;=])", text[end + 1:])
                kind = TYPE.search(strip_templates(head)[0])
                head = "\0" if kind or (rest and "=" in head) else ""
        elif c == "}":
            if scopes:
                scopes.pop()
            head = ""
        elif c == ";":
            if head and not head.startswith("\0"):
                shared = None in scopes or re.search(r"\binline\b", head.split("(")[0])
                defined = variable(strip_templates(head)[0]) if shared and None not in scopes else None
                add(defined or local_variable(head), defined is None)
            head = ""
        else:
            if not head.strip():
                head_line = line
            if not head.startswith("\0"):
                head += c
        if text[i] == "\n":
            line += 1
        i += 1
    return found


def definitions(source, unnamed=False):
    """Lists (namespace, kind, name, line) of a file's definitions that other files could see; unnamed: those in unnamed namespaces instead."""
    return [d[:4] for d in all_definitions(source) if d[4] == (UNNAMED if unnamed else SHARED)]


def sources(root):
    listed = subprocess.run(["git", "ls-files", *("*" + s for s in SUFFIXES)], cwd=root, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [pathlib.PurePosixPath(p) for p in listed.stdout.split("\n") if p]
    return sorted(pathlib.PurePosixPath(p.relative_to(root).as_posix()) for p in pathlib.Path(root).rglob("*") if p.suffix in SUFFIXES)


def is_below(path, folders):
    return any(pathlib.PurePosixPath(f) in path.parents for f in folders)


def is_united(path):
    return path.suffix in (".cpp", ".cu") and is_below(path, UNITED) and not is_below(path, APART)


def clashes(root):
    texts = {p: (pathlib.Path(root) / p).read_text(errors="replace") for p in sources(root) if (pathlib.Path(root) / p).exists()}
    files = {p: all_definitions(text) for p, text in texts.items()}
    result, count = [], 0
    for program, folders in PROGRAMS.items():
        places = {}
        for path, found in files.items():
            if not is_below(path, folders):
                continue
            for space, kind, name, line, reach in found:
                if reach == SHARED:
                    count += 1
                    places.setdefault((space, kind, name), {}).setdefault(path, line)
        for (space, kind, name), where in sorted(places.items()):
            if len(where) > 1:
                whole = f"{space}::{name}" if space else name
                at = " and ".join(f"{p}:{n}" for p, n in sorted(where.items()))
                result.append(f"{kind} {whole} is defined in {at}, both of {program}: rename one, give them one header, or use an "
                              "unnamed namespace (in .cpp and .cu only)")
    return result + united_clashes(files) + hidden_names(files, texts), count


def united_clashes(files):
    """Reports names that two files of one united folder define in unnamed namespaces."""
    places, result = {}, []
    for path, found in files.items():
        if is_united(path):
            for space, kind, name, line, reach in found:
                if reach == UNNAMED:
                    places.setdefault((path.parent, path.suffix, space, kind, name), {}).setdefault(path, line)
    for (_, _, _, kind, name), where in sorted(places.items()):
        if len(where) > 1:
            at = " and ".join(f"{p}:{n}" for p, n in sorted(where.items()))
            result.append(f"{kind} {name} is in the unnamed namespaces of {at}, which tools/test.sh's builds compile as one file: rename one, "
                          "or give them one header")
    return result


def base_name(name):
    """Returns the identifier in a definition's name: "f" for "f(int)"."""
    return re.match(r"\w*", name).group(0)


def is_within(inner, outer):
    return inner == outer or inner.startswith(outer + "::")


def included(path, texts, by_name, known):
    """Returns the project's headers that a file includes directly or indirectly."""
    if path not in known:
        known[path] = set()  # ends the recursion at a header that includes itself
        for name in re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', texts[path], re.M):
            for header in by_name.get(pathlib.PurePosixPath(name).name, ()):
                if str(header).endswith(name):
                    known[path] |= {header} | included(header, texts, by_name, known)
    return known[path]


def hidden_names(files, texts):
    """Reports names in unnamed namespaces of united folders that hide a header's name in another file of the folder, if that file includes the header
    and uses the name."""
    in_headers, by_name, known = {}, {}, {}
    for path, found in files.items():
        if path.suffix in (".h", ".hpp", ".cuh"):
            by_name.setdefault(path.name, []).append(path)
            for space, _, name, _, reach in found:
                if reach != UNNAMED and space:
                    in_headers.setdefault(base_name(name), []).append((space, path))
    words = {p: set(re.findall(r"\w+", without_text(texts[p]))) for p in files if is_united(p)}
    result = []
    for path in words:
        for space, kind, name, line, reach in files[path]:
            word = base_name(name)
            headers = {h for outer, h in in_headers.get(word, ()) if reach == UNNAMED and is_within(space, outer)}
            for other in words if headers else ():
                if other == path or (other.parent, other.suffix) != (path.parent, path.suffix) or word not in words[other]:
                    continue
                header = next((h for h in included(other, texts, by_name, known) if h in headers), None)
                if header and any(is_within(d[0], space) for d in files[other]):
                    result.append(f"{kind} {name} in the unnamed namespace of {path}:{line} hides the name of {header} in {other} where tools/test.sh's "
                                  "builds compile both as one file: rename it")
                    break
    return result


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent)
    found, count = clashes(root)
    print("\n".join(found) or f"one definition: {count} names, none twice")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
