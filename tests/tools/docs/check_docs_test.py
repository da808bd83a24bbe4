#!/usr/bin/env python3
"""Tests that tools/check_docs.py accepts right code blocks and reports each kind of wrong one. usage: check_docs_test.py CHECK_DOCS BUILD CXX CC"""
import os
import pathlib
import subprocess
import sys
import tempfile

CHECK, BUILD, CXX, CC = sys.argv[1:]
SOURCE = pathlib.Path(CHECK).resolve().parent.parent
F = "```"

# name, document, text that the error message must contain (None: the document is right)
CASES = [
    ("program", f"{F}cpp\n#include <cstdio>\nint main() {{ return 0; }}\n{F}", None),
    ("program that fails", f"{F}cpp\nint main() {{ return 3; }}\n{F}", "the program exits with 3"),
    ("program that does not compile", f"{F}cpp\nint main() {{ return x; }}\n{F}", "does not compile"),
    ("body", f"{F}cpp\nauto t = te_fl::Tensor::empty({{2}}, te_fl::DType::kF32);\nif (!t.ok()) return t.status();\n{F}", None),
    ("body that does not compile", f"{F}cpp\nte_fl::Tensr t;\n{F}", "does not compile"),
    ("C body", f"{F}c\nte_fl_tensor t;\nt.struct_size = sizeof t;\n{F}", None),
    ("C that is C++", f"{F}c\nauto x = nullptr;\n{F}", "does not compile"),
    ("C beyond C99", f"{F}c\n#include <stddef.h>\n_Static_assert(1, \"\");\n{F}", "does not compile"),
    ("shell", f"{F}sh\ntest -f README.md\nte-fl --version\n{F}", None),
    ("shell that fails in the middle", f"{F}sh\nfalse\ntrue\n{F}", "exits with 1"),
    ("console", f"{F}console\n$ printf 'one  two\\nthree\\n4\\n'\none two\n...\n4\n{F}", None),
    ("console with another output", f"{F}console\n$ echo one\ntwo\n{F}", "not what the document shows"),
    ("console with an exit code", f"{F}console\n$ te-fl explain no_such_op # exit 2\n...\n{F}", None),
    ("console with the wrong exit code", f"{F}console\n$ true # exit 2\n{F}", "exits with 0"),
    ("file for a later block", f"<!-- file: a/b.txt -->\n{F}ini\nx\n{F}\n\n{F}sh\ngrep x a/b.txt\n{F}", None),
    ("file that nobody uses", f"<!-- file: a/b.txt -->\n{F}ini\nx\n{F}", "used by no sh block"),
    ("file outside", f"<!-- file: ../b.txt -->\n{F}c\nint x;\n{F}", "outside the copy"),
    ("json", f"{F}json\n{{\"a\": 1}}\n{F}", None),
    ("broken json", f"{F}json\n{{\"a\": }}\n{F}", "Expecting value"),
    ("manifest with a misspelt key",
     f'{F}json\n{{"file_format_version": "1.0", "nam": "x", "library_path": "a.so"}}\n{F}', "did you mean"),
    ("output", f"<!-- output-of: echo hello -->\n{F}text\nhel...\n{F}", None),
    ("output that differs", f"<!-- output-of: echo hello -->\n{F}text\nbye\n{F}", "not what the document shows"),
    ("text without a command", f"{F}text\nhello\n{F}", "say of what"),
    ("tested by another", f"<!-- tested-by: docs_code_blocks -->\n{F}sh\nexit 1\n{F}", None),
    ("tested by nobody", f"<!-- tested-by: no_such_test -->\n{F}sh\ntrue\n{F}", "is no ctest test"),
    ("unknown language", f"{F}rust\nfn main() {{}}\n{F}", "language 'rust'"),
    ("no language", f"{F}\nx\n{F}", "language ''"),
    ("hidden code", "Text:\n\n    $ rm -rf x\n", "indented block"),
    ("open fence", f"{F}sh\ntrue\n", "not closed"),
    ("odd fence", f"{F}sh title=x\ntrue\n{F}", "not understood"),
    ("link", "[this](README.md), [its part](#part), [a site](https://example.org/x), `[code](nowhere.md)`", None),
    ("link that leads nowhere", "[that](docs/nowhere.md#part)", "docs/nowhere.md leads to no file"),
    ("picture that is not there", "![a picture](docs/nowhere.svg)", "docs/nowhere.svg leads to no file"),
    ("comment without a block", "<!-- tested-by: docs_code_blocks -->\n\ntext\n", "no block follows"),
]


def index_of(pages):
    """Returns the messages of check_docs.py for a folder with these pages whose index lists only a.md."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "docs").mkdir()
        pathlib.Path(folder, "docs/README.md").write_text("[a](a.md)\n")
        for page in pages:
            pathlib.Path(folder, "docs", page).write_text("text\n")
        return subprocess.run([sys.executable, CHECK, "--source", folder, "--build", BUILD, "--cxx", CXX, "--cc", CC],
                              capture_output=True, text=True, check=False).stdout


def main():
    failed = 0
    for pages, complaint in (["a.md"], " 0 errors"), (["a.md", "b.md"], "b.md is not in this index"):
        message = index_of(pages)
        print(f"{'ok    ' if complaint in message else 'FAILED'} an index of {pages}")
        if complaint not in message:
            failed += 1
            print(message)
    for name, document, complaint in CASES:
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "README.md").write_text(document + "\n")
            pathlib.Path(folder, "docs").mkdir()
            os.symlink(SOURCE / "include", pathlib.Path(folder, "include"))
            subprocess.run(["git", "init", "-q", folder], check=True)
            subprocess.run(["git", "-C", folder, "add", "README.md"], check=True)
            done = subprocess.run([sys.executable, CHECK, "--source", folder, "--build", BUILD, "--cxx", CXX, "--cc", CC],
                                  capture_output=True, text=True, check=False)
        good = done.returncode == (0 if complaint is None else 1) and (complaint or " 0 errors") in done.stdout
        print(f"{'ok    ' if good else 'FAILED'} {name}")
        if not good:
            failed += 1
            print(done.stdout + done.stderr)
    return 1 if failed else 0


sys.exit(main())
