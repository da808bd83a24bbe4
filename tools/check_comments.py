#!/usr/bin/env python3
"""Finds comments that begin as sentence fragments, and meaningless names. Prints each; exits 1 on any.
usage: tools/check_comments.py [--all] [--count] [--draw N --seed S] [PATH...]     (default: every tracked source file)
  --all    also checks the folders that still have violations (UNCLEAN, below)
  --draw   prints N comment blocks and paragraphs of the documents, of at least four words, drawn at random with the seed, each with the ten
           lines below it. A reader then states each block's subject and claim, and every word used in a sense unknown in the field
  --count  prints how many comment blocks begin as fragments, folder by folder, UNCLEAN included, and exits 0

The rule for comments: a comment block or docstring must not begin with one of the words of FRAGMENT, unless its first sentence is
a question that ends with "?". "What is freed here" has no verb of its own, and "What is freed here is the old plan" reads better
as "Frees the old plan", so both are refused. "Where" and "When" may begin a clause that a comma ends: "Where no GPU is, this
test is skipped". A block is a run of comments on adjacent lines. A comment behind code may begin as a phrase that completes its line
(PHRASE: "int64_t rows;  // of one output").

The rule for names: no identifier is in EMPTY_NAMES, and each type of ONE_TYPE is defined once in the whole tree."""
import argparse
import ast
import collections
import io
import pathlib
import random
import re
import subprocess
import sys
import tokenize

from check_odr import TOKEN, without_text

ROOT = pathlib.Path(__file__).resolve().parent.parent
C_SUFFIXES = (".c", ".cpp", ".h", ".hpp", ".cu", ".cuh", ".cl", ".def")
# Folders and files that still violate the rules. The list may only shrink.
UNCLEAN: tuple = ()

FRAGMENT = re.compile(r"(?:what|whatever|whether|of|why|which|who|whom|whose|how|that|the same)\b(?![-(])", re.I)
PHRASE = re.compile(r"(?:of|that|whose|where|when)\b")
CLAUSE = re.compile(r"(?:where|when)\b", re.I)
EMPTY_NAMES = {"care", "nobody", "given", "said", "What", "finish"}
ONE_TYPE = {"Decision", "Candidate", "Call"}
TYPE = re.compile(r"\b(?:struct|class|union|enum)\s+(?:class\s+)?(\w+)\s*(?:final\s*)?(?::[^:;{][^;{]*)?\{")
Block = collections.namedtuple("Block", "line text alone", defaults=(True,))
Problem = collections.namedtuple("Problem", "line text is_comment")


def is_fragment(text, alone=True):
    """Returns True if a comment's text begins as a sentence fragment. `alone` is false for a comment behind code."""
    sentence = re.split(r"(?<=[.?!:;])\s", text.strip(), maxsplit=1)[0]
    if sentence.endswith("?") or (not alone and PHRASE.match(sentence)):
        return False
    return bool(FRAGMENT.match(sentence) or (CLAUSE.match(sentence) and "," not in sentence))


def joined(comments):
    """Joins (line, column, text, alone) entries into blocks: comments on adjacent lines, and comment lines that continue a comment behind code."""
    blocks, last = [], None
    for line, column, text, alone in comments:
        if last and line == last[0] + 1 and alone and (last[2] or column == last[1]):
            blocks[-1] = blocks[-1]._replace(text=blocks[-1].text + " " + text)
        else:
            blocks.append(Block(line, text, alone))
        last = (line + text.count("\n"), column, alone)
    return blocks


def c_comments(source):
    for match in TOKEN.finditer(source):
        if match.group("comment") is None:
            continue
        begin = source.rfind("\n", 0, match.start()) + 1
        text = re.sub(r"^(?://+|/\*+)[!<]*\s*|\s*\*/$", "", match.group(0))
        yield source.count("\n", 0, match.start()) + 1, match.start() - begin, text, not source[begin:match.start()].strip()


def c_types(code):
    return [(code.count("\n", 0, m.start()) + 1, m.group(1)) for m in TYPE.finditer(code)]


def c_problems(source):
    code = without_text(source)
    names = [(code.count("\n", 0, m.start()) + 1, m.group(0)) for m in re.finditer(r"\b(?:%s)\b" % "|".join(EMPTY_NAMES), code)]
    return joined(c_comments(source)), names


def python_blocks(source):
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append((token.start[0], token.start[1], token.string.lstrip("#! "), not token.line[:token.start[1]].strip()))
    blocks = joined(comments)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
            blocks.append(Block(node.body[0].lineno, ast.get_docstring(node)))
    return sorted(blocks)


def python_problems(source):
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return python_blocks(source), [(t.start[0], t.string) for t in tokens if t.type == tokenize.NAME and t.string in EMPTY_NAMES]


def find_problems(path, source):
    """Returns the problems of one file and the number of its comment blocks."""
    blocks, names = python_problems(source) if path.endswith(".py") else c_problems(source)
    found = [Problem(b.line, f'begins as a fragment: "{b.text[:70]}"', True) for b in blocks if is_fragment(b.text, b.alone)]
    found += [Problem(line, f"'{name}' says nothing: name the noun it stands for", False) for line, name in names]
    return sorted(found), len(blocks)


def find_types(path, source):
    """Returns (line, name) of each type of ONE_TYPE that a file defines."""
    if path.endswith(".py"):
        found = [(n.lineno, n.name) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)]
    else:
        found = c_types(without_text(source))
    return [(line, name) for line, name in found if name in ONE_TYPE]


def tracked():
    listed = subprocess.run(["git", "ls-files", "*.py", *("*" + s for s in C_SUFFIXES)], cwd=ROOT, check=True, capture_output=True, text=True)
    return [p for p in listed.stdout.split("\n") if p and (ROOT / p).exists()]


def paragraphs(source):
    """Returns the paragraphs of a Markdown document, without headings, tables and code."""
    line, found, in_code = 1, [], False
    for text in re.split(r"(\n\s*\n)", source):
        fences = text.count("```")
        if text.strip() and not in_code and not fences and not re.match(r"\n*(?:#|\||    |<!--)", text):
            found.append(Block(line + len(text) - len(text.lstrip("\n")), text))
        in_code ^= fences % 2 == 1
        line += text.count("\n")
    return found


def drawn(count, seed, paths):
    """Returns the text of the blocks that --draw prints."""
    listed = subprocess.run(["git", "ls-files", "README.md", "CONTRIBUTING.md", "docs/*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    everything = []
    for path in [*tracked(), *listed.stdout.split()]:
        if paths and not below(path, paths):
            continue
        source = (ROOT / path).read_text()
        blocks = paragraphs(source) if path.endswith(".md") else python_blocks(source) if path.endswith(".py") else joined(c_comments(source))
        everything += [(path, block.line) for block in blocks if len(block.text.split()) >= 4 and "noqa" not in block.text]
    for number, (path, line) in enumerate(random.Random(seed).sample(everything, min(count, len(everything))), 1):
        lines = (ROOT / path).read_text().split("\n")[line - 1:]
        marks = ("//", "*", "#")
        ends = (not text.strip() if path.endswith(".md") else not text.lstrip().startswith(marks) for text in lines[1:])
        own = next((i for i, end in enumerate(ends, 1) if end), len(lines))
        yield "\n".join([f"[{number}] {path}:{line}", *lines[:own + 10], ""])


def below(path, folders):
    return any(path == f or path.startswith(f.rstrip("/") + "/") for f in folders)


def component(path):
    parts = path.split("/")[:-1]
    return "/".join(parts[:2]) or "."


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--all", action="store_true")
    options.add_argument("--count", action="store_true")
    options.add_argument("--draw", type=int, metavar="N")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("paths", nargs="*")
    options = options.parse_args()
    if options.draw is not None:
        print("\n".join(drawn(options.draw, options.seed, options.paths)))
        return 0
    bad, blocks, types = [], collections.Counter(), collections.defaultdict(list)
    fragments = collections.Counter()
    for path in tracked():
        if options.paths and not below(path, options.paths):
            continue
        source = (ROOT / path).read_text()
        found, count = find_problems(path, source)
        blocks[component(path)] += count
        fragments[component(path)] += sum(p.is_comment for p in found)
        if options.all or options.paths or not below(path, UNCLEAN):
            bad += [f"{path}:{p.line}: {p.text}" for p in found]
            for line, name in find_types(path, source):
                types[name].append(f"{path}:{line}")
    for name, places in sorted(types.items()):
        if len(places) > 1:
            bad.append(f"{name} is one type in the whole tree, and is defined in {' and '.join(places)}: name each for what it is")
    if options.count:
        for name in sorted(blocks):
            print(f"{fragments[name]:5d} of {blocks[name]:5d} blocks  {name}")
        print(f"{sum(fragments.values()):5d} of {sum(blocks.values()):5d} comment blocks begin as fragments")
        return 0
    print("\n".join(bad) or f"comments: {sum(blocks.values())} blocks, none begins as a fragment; no name that says nothing")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
