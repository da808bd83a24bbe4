#!/usr/bin/env python3
"""Tests tools/check_odr.py: which names that are defined twice are a clash and which are not."""

import os
import sys
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "tools"))
from check_odr import clashes  # noqa: E402


class OneDefinition(unittest.TestCase):
    def found(self, one, other, paths=("backends/cuda/one.hpp", "backends/cuda/other.cuh")):
        """Returns the clashes of two files, each as "kind name"."""
        with tempfile.TemporaryDirectory() as folder:
            for path, text in zip(paths, (one, other)):
                os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
                with open(os.path.join(folder, path), "w") as file:
                    file.write(text)
            return [line.split(" is defined in ")[0] for line in clashes(folder)[0]]

    def in_namespace(self, one, other, **more):
        return self.found(f"namespace te_fl::cuda {{\n{one}\n}}\n", f"namespace te_fl {{ namespace cuda {{\n{other}\n}} }}\n", **more)

    def test_the_two_that_this_repository_had(self):
        self.assertEqual(
            self.in_namespace("struct Operand { const te_fl_tensor* tensor = nullptr; };\n"
                              "inline int64_t bytes_of(int dtype) { return dtype == TE_FL_F32 ? 4 : is_fp8(dtype) ? 1 : 2; }",
                              "// A source.\nstruct Operand {\n  Source source;\n  int64_t first = 0, stride = 0;\n};\n"
                              "inline int64_t bytes_of(int dtype) noexcept { return dtype == TE_FL_F32 ? 4 : 2; }"),
            ["function te_fl::cuda::bytes_of(int)", "type te_fl::cuda::Operand"])

    def test_templates_enumerations_and_variables(self):
        for one, other, name in (
                ("template <int kBytes>\nstruct Place { int c; };", "template <class T>\nstruct Place { T t; };", "type te_fl::cuda::Place"),
                ("enum class Kind : int { kA };", "enum class Kind { kB };", "type te_fl::cuda::Kind"),
                ("class alignas(16) Piece final : public Base { };", "union Piece { int i; };", "type te_fl::cuda::Piece"),
                ("inline int g_count = 0;", "inline int g_count{1};", "variable te_fl::cuda::g_count"),
                ("template <class T>\n__device__ T sum(T a, const T (&b)[8]) { return a; }",
                 "template <class U> __device__ inline T sum(T x, const T (&y)[8]) { return x; }",
                 "function te_fl::cuda::sum(T, const T (&)[8]) (template 1)"),
                ("constexpr int twice(int a, std::vector<int> b = {1, 2}) { return 2 * a; }",
                 "int twice(int, std::vector<int>) { return 3; }", "function te_fl::cuda::twice(int, std::vector<int>)"),
                ("inline bool operator==(const A& a, const A& b) { return true; }",
                 "inline bool operator==(const A& l, const A& r) { return false; }", "function te_fl::cuda::operator==(const A&, const A&)")):
            self.assertEqual(self.in_namespace(one, other), [name], one)

    def test_unnamed_namespaces_of_files_that_are_compiled_as_one(self):
        united = ("nn/modules/one.cpp", "nn/modules/other.cpp")
        for text, other, name in (
                ("constexpr int kMost = 1;", "const char* const kMost[] = {\"a\", \"b\"};", "variable kMost"),
                ("constinit core::ForkMutex mutex(core::Level::kOne);", "core::Mutex mutex{3};", "variable mutex"),
                ("struct Plan { int i; };", "class Plan { };", "type Plan"),
                ("int f(int i) { return i; }", "int f(int k) { return 2; }", "function f(int)")):
            one, two = f"namespace te_fl {{ namespace {{\n{text}\n}} }}", f"namespace te_fl {{ namespace {{\n{other}\n}} }}"
            found = [line.split(" is in the unnamed")[0] for line in self.found(one, two, paths=united)]
            self.assertEqual(found, [name], text)
            self.assertEqual(self.found(one, two, paths=("nn/modules/one.cpp", "nn/optim/other.cpp")), [], "other folders are apart")
            self.assertEqual(self.found(one, two, paths=("backends/opencl/one.cpp", "backends/opencl/other.cpp")), [], "and other libraries")
            self.assertEqual(self.found(one, two, paths=("backends/cuda/gemm/one.cu", "backends/cuda/gemm/other.cpp")), [], "and files of CUDA")
        for text, other in (("int f(int);", "int f(int i) { return i; }"), ("int f(int i) { return i; }", "int f(long i) { return 1; }"),
                            ("using Clock = std::chrono::steady_clock;", "using Clock = std::chrono::steady_clock;")):
            self.assertEqual(self.found(f"namespace {{\n{text}\n}}", f"namespace {{\n{other}\n}}", paths=united), [], text)

    def test_names_that_hide_those_of_headers(self):
        """In a unity build, a name of one file's unnamed namespace would hide a header's name in the files after it."""
        header = "namespace te_fl::cuda {\nconstexpr int kAtOnce = 4;\ninline int blocks_of(int n) { return n / kAtOnce; }\nstruct Piece { int i; };\n}"
        user = '#include "common/nest.hpp"\nnamespace te_fl::cuda {\nint f(int n) { return %s; }\n}'

        def found(hider, used, paths=("backends/cuda/pointwise/one.cu", "backends/cuda/pointwise/other.cu"), include=True):
            with tempfile.TemporaryDirectory() as folder:
                text = user % used
                files = {"backends/cuda/common/nest.hpp": header, paths[0]: f"namespace te_fl::cuda {{\nnamespace {{\n{hider}\n}}\n}}",
                         paths[1]: text if include else text.split("\n", 1)[1]}
                for path, content in files.items():
                    os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
                    with open(os.path.join(folder, path), "w") as file:
                        file.write(content)
                return [line.split(" in the unnamed")[0] for line in clashes(folder)[0]]

        self.assertEqual(found("constexpr int kAtOnce = 2;", "kAtOnce"), ["variable kAtOnce"])
        self.assertEqual(found("int blocks_of(long n) { return 1; }", "blocks_of(n)"), ["function blocks_of(long)"])
        self.assertEqual(found("class Piece { };", "Piece{n}.i"), ["type Piece"])
        self.assertEqual(found("constexpr int kAtOnce = 2;", "n"), [], "the other file does not use it")
        self.assertEqual(found("constexpr int kAtOnce = 2;", "kAtOnce", include=False), [], "nor includes the header")
        for apart in ("backends/cuda/norm/one.cu", "backends/cuda/pointwise/one.cpp"):
            self.assertEqual(found("constexpr int kAtOnce = 2;", "kAtOnce", paths=(apart, "backends/cuda/pointwise/other.cu")), [], "compiled apart")

    def test_what_is_no_clash(self):
        for one, other in (
                ("struct A;\nint f(int);", "struct A { int i; };\nint f(int i) { return i; }"),  # declarations
                ("int f(int i) { return i; }", "int f(long i) { return 1; }"),                  # overloads
                ("namespace { struct A { }; int f() { return 1; } }", "struct A { int i; };\nint f() { return 2; }"),
                ("static int f() { return 1; }\nconstexpr int kMost[] = {1};", "static int f() { return 2; }\nconstexpr int kMost[] = {2};"),
                ("namespace inner { struct A { }; }", "struct A { int i; };"),
                ("struct A { struct Inner { }; int f() { return 1; } };", "struct B { struct Inner { int i; }; int f() { return 2; } };"),
                ("template <> struct A<int> { };", "template <> struct A<long> { };"),
                ("const char* text = \"struct B { };\";", "struct B { };"),
                ("// struct B { }\n#define B struct B { }", "struct B { };"),
                ("int f() { struct Local { }; return 1; }", "int g() { struct Local { int i; }; return 1; }"),
                ("Shape::Shape(Shape&& o) noexcept : a_(std::exchange(o.a_, Device{})), b_(1) { }",
                 "Place::Place(Place&& o) noexcept : a_(std::exchange(o.a_, Device{})), b_(1) { }")):
            self.assertEqual(self.in_namespace(one, other), [], one)

    def test_files_that_are_never_linked_with_each_other(self):
        text = "struct A { };"
        self.assertEqual(self.in_namespace(text, text, paths=("backends/cuda/a.hpp", "backends/opencl/a.hpp")), [])
        self.assertEqual(self.in_namespace(text, text, paths=("backends/cuda/a.hpp", "include/te_fl/a.hpp")), ["type te_fl::cuda::A"])

    def test_this_repository(self):
        found, count = clashes(ROOT)
        self.assertEqual(found, [])
        self.assertGreater(count, 2000)


if __name__ == "__main__":
    unittest.main()
