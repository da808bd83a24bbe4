#!/usr/bin/env python3
"""Compiles or runs every fenced code block of README.md, CHANGELOG.md and docs/*.md.

The blocks of one document run in order in one scratch copy of the tracked files, in which build/release is the tested
build and the command te-fl is that build's. By language:

  cpp      with `int main(`: compiled, linked with libte_fl, run; must exit 0.
           with an #include: a source file of its own; compiled.
           otherwise: the body of a function that returns te_fl::Status; compiled.
  c        with an #include: a C99 source file; otherwise the body of a C99 function. Compiled.
  sh       run by bash -e; must exit 0.
  console  lines that begin with `$ ` are run, the others are their output (a command may end with `# exit N`).
  json     parsed; a block with a library_path by te-fl's own manifest parser.
  text     output of a command, named by the comment `output-of`.

In expected output a line `...` matches any lines, `...` inside a line matches any text, and runs of blanks are equal.
Comments on the line before a block change what happens:

  <!-- file: PATH -->        the block is written to PATH in the scratch copy, for later sh blocks. It is also checked by its
                             language; other languages are allowed with this comment, if an sh block follows.
  <!-- output-of: COMMAND --> (text) the block is that command's output.
  <!-- tested-by: NAME -->   the block is not run here, because the ctest test NAME runs it.

Any other language is an error, and so is code that hides in an indented block. A link, in CONTRIBUTING.md, bench and the folders of backends too, must lead to a file of the tree, and
docs/README.md, if present, must link to every page of docs.

usage: check_docs.py --source DIR --build DIR --cxx C++ --cc CC [--only FILE[:LINE]]... [--keep]
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

CXX_INCLUDES = """#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>
#include "te_fl/backend.hpp"
#include "te_fl/nn.hpp"
#include "te_fl/te_fl.hpp"
"""
C_INCLUDES = """#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "te_fl/ops/activation.h"
#include "te_fl/ops/norm.h"
#include "te_fl/plugin.h"
"""
DIRECTIVE = re.compile(r"^\s*<!--\s*(file|output-of|tested-by):\s*(.*?)\s*-->\s*$")
FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([A-Za-z0-9_+-]*)\s*$")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]*)(#[^)\s]*)?\)|!\[[^\]]*\]\(([^)\s]*)\)")
# Commands and code that an indented block must not begin with; indented blocks are for formulas and diagrams.
HIDDEN_CODE = re.compile(r"^ {4,}(\$ |#include|(cmake|ctest|g\+\+|gcc|clang|python3|apt-get|sudo|te-fl|tools/|build/|export|git) )")
TIMEOUT_S = 120


class Block:
    def __init__(self, document, line, language, directives):
        self.document, self.line, self.language, self.directives = document, line, language, directives
        self.lines = []

    @property
    def text(self):
        return "\n".join(self.lines) + "\n"

    @property
    def where(self):
        return f"{self.document}:{self.line}"


def code_blocks(document, text):
    """Returns the fenced blocks of a document and the errors in its form."""
    blocks, errors, current, fence, directives, previous = [], [], None, None, {}, ""
    for number, line in enumerate(text.split("\n"), 1):
        if current is not None:
            if line.strip() == fence:
                blocks.append(current)
                current, directives = None, {}
            else:
                current.lines.append(line[indent:] if line[:indent].isspace() else line)
            continue
        opening, directive = FENCE.match(line), DIRECTIVE.match(line)
        if opening:
            indent, fence = len(opening[1]), opening[2]
            current = Block(document, number, opening[3], directives)
        elif directive:
            directives[directive[1]] = directive[2]
        else:
            if line.strip() and directives:
                errors.append(f"{document}:{number}: a comment for a block, but no block follows")
                directives = {}
            if HIDDEN_CODE.match(line) and not previous.strip():
                errors.append(f"{document}:{number}: code in an indented block; put it into a fence")
            if re.match(r"^\s*(`{3,}|~{3,})", line):
                errors.append(f"{document}:{number}: a fence that is not understood: {line.strip()}")
        previous = line
    if current is not None:
        errors.append(f"{current.where}: the fence is not closed")
    return blocks, errors


def run(command, **options):
    """Runs a command; returns its exit code, stdout and stderr."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
                              stdin=subprocess.DEVNULL, **options)
        return done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        return 124, "", f"still running after {TIMEOUT_S} s"


def matches(expected, actual):
    """Returns True if the output matches the output shown in the document."""
    pattern = ""
    for line in expected.strip("\n").split("\n"):
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            parts = [r"[ \t]+".join(re.escape(word) for word in re.split(r"[ \t]+", part)) for part in
                     line.strip().split("...")]
            pattern += r"[ \t]*" + r"[^\n]*".join(parts) + r"[ \t]*\n"
    return re.fullmatch(pattern, actual.strip("\n") + "\n") is not None


def find_links(text):
    """Returns the files that a document links to or shows, without links to other sites and within the document."""
    prose = re.sub(r"^\s*(```|~~~).*?^\s*\1\s*$", "", text, flags=re.M | re.S)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    found = [target or image for target, _, image in LINK.findall(prose)] + re.findall(r'(?:src|srcset)="([^"]+)"', prose)
    return [target for target in found if target and "://" not in target]


class Checker:
    def __init__(self, options):
        self.source, self.build = pathlib.Path(options.source).resolve(), pathlib.Path(options.build).resolve()
        self.cxx, self.cc, self.keep = options.cxx, options.cc, options.keep
        self.only = options.only
        self.tests = None
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="te_fl_docs_"))

    def selected(self, block):
        return not self.only or any(block.where == o or block.document == o for o in self.only)

    def links(self, document, text):
        """Reports links whose target does not exist, and pages of docs that the index does not list."""
        folder = (self.source / document).parent
        targets = find_links(text)
        errors = [f"{document}: the link {target} leads to no file" for target in targets if not (folder / target).exists()]
        if document == "docs/README.md":
            named = {(folder / target).resolve() for target in targets}
            errors += [f"{document}: {page.name} is not in this index" for page in sorted(folder.glob("*.md"))
                       if page.name != "README.md" and page.resolve() not in named]
        return errors

    def check(self):
        documents = [p for p in ("README.md", "CHANGELOG.md") if (self.source / p).exists()]
        documents += sorted(f"docs/{p.name}" for p in (self.source / "docs").glob("*.md"))
        errors, counts, compiled, sequences = [], {}, [], []
        for document in documents:
            text = (self.source / document).read_text()
            blocks, wrong = code_blocks(document, text)
            errors += wrong + self.links(document, text)
            for i, block in enumerate(blocks):
                errors += self.form(block, blocks[i + 1:])
                counts[block.language] = counts.get(block.language, 0) + 1
                if block.language in ("c", "cpp") and "tested-by" not in block.directives and self.selected(block):
                    compiled.append(block)
            if any(self.selected(b) for b in blocks):
                sequences.append((document, blocks))
        others = [self.source / "CONTRIBUTING.md", self.source / "bench/README.md", *self.source.glob("bench/results/*.md"),
                  *self.source.glob("backends/*/README.md")]
        for page in (str(other.relative_to(self.source)) for other in others):
            if (self.source / page).exists():
                errors += self.links(page, (self.source / page).read_text())
        if not errors:
            jobs = max(1, min(4, os.cpu_count() or 1))
            with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
                waiting = [pool.submit(self.compile, i, b) for i, b in enumerate(compiled)]
                waiting += [pool.submit(self.sequence, d, b) for d, b in sequences]
                for done in waiting:
                    errors += done.result()
        if not self.keep:
            shutil.rmtree(self.work, ignore_errors=True)
        for error in errors:
            print(error)
        total = ", ".join(f"{n} {language}" for language, n in sorted(counts.items()))
        print(f"docs: {sum(counts.values())} blocks ({total}) in {len(documents)} documents, {len(errors)} errors")
        return 1 if errors else 0

    def form(self, block, following):
        known = ("cpp", "c", "sh", "console", "json", "text")
        if "tested-by" in block.directives:
            name = block.directives["tested-by"]
            if self.tests is None:
                code, out, err = run(["ctest", "--test-dir", str(self.build), "--show-only=json-v1"])
                self.tests = {t["name"] for t in json.loads(out)["tests"]} if code == 0 else set()
                if code != 0:
                    return [f"{block.where}: ctest cannot list the tests: {err}"]
            return [] if name in self.tests else [f"{block.where}: tested-by names '{name}', which is no ctest test"]
        if "file" in block.directives:
            if block.language not in ("cpp", "c", "json") and not any(b.language in ("sh", "console") for b in following):
                return [f"{block.where}: file {block.directives['file']} is used by no sh block"]
            path = pathlib.PurePosixPath(block.directives["file"])
            return [f"{block.where}: file {path} is outside the copy"] if path.is_absolute() or ".." in path.parts else []
        if block.language not in known:
            return [f"{block.where}: language '{block.language}' is not one of {', '.join(known)}; see tools/check_docs.py"]
        if block.language == "text" and "output-of" not in block.directives:
            return [f"{block.where}: text is output: say of what (<!-- output-of: COMMAND --> or <!-- tested-by: TEST -->)"]
        return []

    # ---- compiled blocks

    def compile(self, index, block):
        is_c = block.language == "c"
        own_file = re.search(r"^\s*#\s*include", block.text, re.M)
        program = re.search(r"\bint main\(", block.text)
        where = f'#line {block.line + 1} "{self.source / block.document}"\n'
        if own_file or program:
            text = where + block.text
        elif is_c:
            text = f"{C_INCLUDES}void example(void);\nvoid example(void) {{\n{where}{block.text}}}\n"
        else:
            text = f"{CXX_INCLUDES}te_fl::Status example();\nte_fl::Status example() {{\n{where}{block.text}return {{}};\n}}\n"
        path = self.work / f"block{index}.{'c' if is_c else 'cpp'}"
        path.write_text(text)
        warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-variable", "-Wno-unused-function"]
        command = [self.cc, "-std=c99", "-pedantic"] if is_c else [self.cxx, "-std=c++20"]
        command += warnings + ["-O0", "-I", str(self.source / "include"), str(path)]
        if not program:
            code, out, err = run(command + ["-fsyntax-only"])
            return [f"{block.where}: does not compile\n{out}{err}"] if code != 0 else []
        lib, exe = self.build / "lib", path.with_suffix("")
        code, out, err = run(command + ["-o", str(exe), f"-L{lib}", f"-Wl,-rpath,{lib}", "-lte_fl", "-pthread"])
        if code != 0:
            return [f"{block.where}: does not compile\n{out}{err}"]
        code, out, err = run([str(exe)], env=self.environment(self.work), cwd=self.work)
        (self.work / f"{exe.name}.out").write_text(out)
        return [f"{block.where}: the program exits with {code}\n{out}{err}"] if code != 0 else []

    # ---- blocks that run in the scratch copy

    def environment(self, home):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TE_FL_", "TEFL_"))}
        env.update(PATH=f"{self.build / 'bin'}:{env['PATH']}", HOME=str(home), XDG_DATA_HOME=str(home / ".data"),
                   LC_ALL="C.UTF-8", CC=self.cc, CXX=self.cxx, NO_COLOR="1")
        return env

    def copy(self, document):
        """Copies the tracked files to a scratch folder, with build/release linked to the tested build."""
        to = self.work / re.sub(r"\W", "_", document)
        listed = subprocess.run(["git", "-C", str(self.source), "ls-files", "-z"], capture_output=True, check=False)
        if listed.returncode == 0:
            files = [f for f in listed.stdout.decode().split("\0") if f]
        else:  # the tree is an unpacked archive, not a git checkout
            files = [str(p.relative_to(self.source)) for top in ("CMakeLists.txt", "README.md", "backends", "bench", "cmake",
                     "core", "dispatch", "docs", "examples", "include", "nn", "ops", "plugins", "policy", "python", "registry", "tests",
                     "tools") for p in [self.source / top, *(self.source / top).rglob("*")] if p.is_file()]
        for name in files:
            if (self.source / name).is_file():
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.source / name, to / name)
        (to / "build").mkdir(parents=True, exist_ok=True)
        (to / "build/release").symlink_to(self.build)
        return to

    def sequence(self, document, blocks):
        if not any(b.language in ("sh", "console", "text", "json") or "file" in b.directives for b in blocks):
            return []
        folder, errors = self.copy(document), []
        env = self.environment(folder)
        for block in blocks:
            if "tested-by" in block.directives:
                continue
            if "file" in block.directives:
                path = folder / block.directives["file"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
            step = {"sh": self.shell, "console": self.console, "text": self.output, "json": self.json}.get(block.language)
            if step:
                errors += step(block, folder, env)
        return errors

    def shell(self, block, folder, env):
        code, out, err = run(["bash", "-euo", "pipefail", "-c", block.text], cwd=folder, env=env)
        return [f"{block.where}: exits with {code}\n{out}{err}"] if code != 0 else []

    def output(self, block, folder, env):
        return self.compare(block, block.directives["output-of"], block.text, folder, env)

    def console(self, block, folder, env):
        errors, command, expected = [], None, []
        for line in block.lines + ["$ "]:
            if line.startswith("$ "):
                if command is not None:
                    errors += self.compare(block, command, "\n".join(expected), folder, env)
                command, expected = line[2:], []
            elif command is not None and command.endswith("\\"):
                command = command[:-1] + line
            elif command is None:
                return [f"{block.where}: a console block begins with '$ COMMAND'"]
            else:
                expected.append(line)
        return errors

    def compare(self, block, command, expected, folder, env):
        wanted = re.search(r"#\s*exit (\d+)\s*$", command)
        # Runs without the plugins of the build tree: machines build different plugins, and the output in a document must not depend on them.
        code, out, err = run(["bash", "-uo", "pipefail", "-c", command], cwd=folder, env=env | {"TE_FL_PLUGIN_PATH": ""})
        if code != (int(wanted[1]) if wanted else 0):
            return [f"{block.where}: `{command}` exits with {code}\n{out}{err}"]
        if expected.strip() and not matches(expected, out + err):
            return [f"{block.where}: the output of `{command}` is not what the document shows; it is\n{out}{err}"]
        return []

    def json(self, block, folder, env):
        try:
            value = json.loads(block.text)
        except ValueError as error:
            return [f"{block.where}: {error}"]
        if not isinstance(value, dict) or "library_path" not in value:
            return []
        path = folder / "manifest_in_document.json"
        path.write_text(block.text)
        code, out, err = run([str(self.build / "bin/parse_manifest"), str(path)], env=env)
        return [f"{block.where}: {out}{err}"] if code != 0 else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=pathlib.Path(__file__).resolve().parent.parent)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--cxx", default=os.environ.get("CXX", "c++"))
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"))
    parser.add_argument("--only", action="append", help="a document, or FILE:LINE of a block")
    parser.add_argument("--keep", action="store_true", help="leave the scratch copies")
    options = parser.parse_args()
    checker = Checker(options)
    if options.keep:
        print(f"scratch copies in {checker.work}")
    return checker.check()


if __name__ == "__main__":
    sys.exit(main())
