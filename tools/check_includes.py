#!/usr/bin/env python3
"""Finds files that use a name without including a header that declares it: they compile only within a unity build (te_fl_unite in
CMakeLists.txt), or behind a precompiled header. Prints every such name; exits 1 on any.
usage: tools/check_includes.py [ROOT]     (default: this repository; only tracked files where ROOT is a git tree)

A name of the standard library counts as declared by the headers that STANDARD lists for it, not by a header that happens to include one of those. A
name of the project counts as declared by the headers that define it, and also if a header that the file includes, directly or
indirectly, mentions the same name. Members, parameters and forward declarations are therefore not reported; a missing include of such a name may be
missed."""
import pathlib
import re
import sys

import check_odr

# The names that each standard header declares; a name that is listed under two headers may come from either.
STANDARD = {
    "algorithm": "all_of any_of none_of for_each find find_if find_if_not count count_if equal mismatch search copy copy_n copy_if copy_backward "
                 "transform replace fill fill_n generate generate_n remove remove_if unique reverse rotate partition stable_partition sort "
                 "stable_sort nth_element lower_bound upper_bound equal_range binary_search merge includes max_element min_element minmax_element "
                 "min max minmax clamp lexicographical_compare next_permutation is_sorted partial_sort shuffle adjacent_find swap_ranges ranges::*",
    "array": "array to_array", "atomic": "atomic atomic_ref atomic_flag memory_order memory_order_relaxed memory_order_acquire memory_order_release "
    "memory_order_acq_rel memory_order_seq_cst atomic_thread_fence atomic_signal_fence",
    "barrier": "barrier", "bit": "bit_cast popcount countr_zero countl_zero bit_width bit_ceil bit_floor has_single_bit endian rotl rotr",
    "bitset": "bitset", "charconv": "from_chars to_chars chars_format", "chrono": "chrono::*",
    "cctype": "isalnum isalpha isdigit isspace isupper islower isxdigit isprint ispunct tolower toupper",
    "cerrno": "", "cfenv": "fesetround fegetround feclearexcept fetestexcept", "cfloat": "",
    "cmath": "abs fabs sqrt exp exp2 expm1 log log2 log1p log10 pow sin cos tan tanh sinh cosh atan atan2 erf erfc floor ceil round nearbyint rint lrint "
             "trunc isnan isinf isfinite signbit copysign fmod fma fmax fmin ldexp frexp nextafter nexttoward hypot lround llround cbrt ilogb scalbn tgamma lgamma",
    "compare": "strong_ordering weak_ordering partial_ordering", "complex": "complex", "concepts": "same_as convertible_to derived_from integral "
    "floating_point invocable constructible_from", "condition_variable": "condition_variable condition_variable_any cv_status",
    "csignal": "signal raise sig_atomic_t", "cstddef": "byte max_align_t nullptr_t",
    "cstdio": "printf fprintf snprintf sscanf fopen fclose fread fwrite fflush fputs fgets fputc puts remove rename FILE perror fseek ftell vsnprintf tmpfile setvbuf ferror feof",
    "cstdlib": "getenv malloc free calloc realloc abort exit _Exit quick_exit atexit strtol strtoul strtoll strtoull strtod strtof atoi aligned_alloc system abs rand srand "
               "at_quick_exit",
    "cstring": "memcpy memset memmove memcmp memchr strlen strcmp strncmp strchr strrchr strstr strerror strcpy strncpy strcat strcspn strspn",
    "ctime": "time localtime gmtime strftime timespec mktime clock time_t tm", "deque": "deque",
    "exception": "exception exception_ptr current_exception rethrow_exception terminate uncaught_exceptions set_terminate make_exception_ptr",
    "filesystem": "filesystem::*", "forward_list": "forward_list", "fstream": "ifstream ofstream fstream filebuf",
    "functional": "function hash plus minus multiplies less greater equal_to not_equal_to bind ref cref reference_wrapper mem_fn invoke bit_or bit_and",
    "future": "future promise async packaged_task shared_future launch future_status", "initializer_list": "initializer_list",
    "iomanip": "setw setfill setprecision put_time get_time quoted", "ios": "ios hex dec fixed scientific streamsize streamoff ios_base streampos",
    "iostream": "cout cerr cin clog", "istream": "istream ws", "iterator": "back_inserter inserter make_move_iterator move_iterator advance next prev distance "
    "istreambuf_iterator ostreambuf_iterator istream_iterator ostream_iterator reverse_iterator size data empty begin end rbegin rend cbegin cend "
    "input_iterator_tag forward_iterator_tag random_access_iterator_tag iterator_traits ssize back_insert_iterator",
    "latch": "latch", "limits": "numeric_limits", "list": "list", "map": "map multimap",
    "memory": "unique_ptr shared_ptr weak_ptr make_unique make_shared enable_shared_from_this addressof allocator default_delete static_pointer_cast "
              "dynamic_pointer_cast const_pointer_cast align assume_aligned uninitialized_copy destroy_at construct_at allocate_shared make_unique_for_overwrite "
              "owner_less atomic_load atomic_store",
    "memory_resource": "pmr::*", "mutex": "mutex recursive_mutex timed_mutex lock_guard unique_lock scoped_lock once_flag call_once defer_lock adopt_lock try_to_lock lock "
    "recursive_timed_mutex", "new": "nothrow bad_alloc align_val_t launder set_new_handler nothrow_t get_new_handler hardware_destructive_interference_size",
    "numbers": "numbers::*", "numeric": "accumulate iota inner_product partial_sum reduce gcd lcm exclusive_scan inclusive_scan transform_reduce adjacent_difference midpoint",
    "optional": "optional nullopt make_optional nullopt_t", "ostream": "ostream endl flush", "queue": "queue priority_queue",
    "random": "mt19937 mt19937_64 uniform_int_distribution uniform_real_distribution normal_distribution random_device default_random_engine bernoulli_distribution minstd_rand "
              "discrete_distribution", "ratio": "ratio milli micro nano", "regex": "regex regex_search regex_match regex_replace smatch cmatch sregex_iterator",
    "semaphore": "counting_semaphore binary_semaphore", "set": "set multiset", "shared_mutex": "shared_mutex shared_lock shared_timed_mutex",
    "span": "span as_bytes as_writable_bytes dynamic_extent", "sstream": "stringstream ostringstream istringstream", "stack": "stack",
    "stdexcept": "runtime_error logic_error invalid_argument out_of_range length_error domain_error overflow_error range_error underflow_error",
    "stop_token": "stop_token stop_source", "streambuf": "streambuf",
    "string": "string to_string stoi stol stoll stoul stoull stof stod getline char_traits basic_string wstring u8string",
    "string_view": "string_view basic_string_view", "system_error": "error_code error_condition system_error generic_category system_category errc make_error_code",
    "thread": "thread jthread this_thread::*", "tuple": "tuple tie make_tuple get apply tuple_size tuple_element forward_as_tuple ignore tuple_cat tuple_size_v tuple_element_t",
    "type_traits": "is_same is_same_v decay_t remove_cvref_t remove_reference_t conditional_t enable_if_t is_integral_v is_floating_point_v is_signed_v is_unsigned_v "
                   "is_trivially_copyable_v is_standard_layout_v true_type false_type integral_constant void_t invoke_result_t is_void_v is_base_of_v is_convertible_v is_const_v "
                   "make_unsigned_t make_signed_t underlying_type_t is_enum_v is_pointer_v remove_const_t remove_cv_t add_const_t is_class_v is_nothrow_move_constructible_v "
                   "is_default_constructible_v type_identity_t is_invocable_v is_constructible_v is_reference_v remove_pointer_t is_arithmetic_v bool_constant is_trivially_destructible_v "
                   "is_copy_constructible_v is_constant_evaluated is_invocable_r_v is_nothrow_invocable_v common_type_t is_lvalue_reference_v is_array_v remove_extent_t",
    "typeindex": "type_index", "typeinfo": "type_info bad_cast", "unordered_map": "unordered_map unordered_multimap", "unordered_set": "unordered_set unordered_multiset",
    "utility": "move forward pair make_pair swap exchange index_sequence make_index_sequence integer_sequence in_place in_place_t declval as_const cmp_less cmp_equal "
               "index_sequence_for piecewise_construct cmp_greater in_range to_underlying in_place_type unreachable",
    "valarray": "valarray", "variant": "variant visit get get_if holds_alternative monostate variant_size_v in_place_index variant_alternative_t bad_variant_access",
    "vector": "vector",
}
# header -> headers that the standard, or every implementation, makes it include.
IMPLIED = {"iostream": ["ostream", "istream", "ios", "streambuf"], "fstream": ["ostream", "istream", "ios", "streambuf"], "sstream": ["ostream", "istream", "ios", "string"],
           "ostream": ["ios"], "istream": ["ios"], "iomanip": ["ios"], "filesystem": ["system_error", "chrono"], "system_error": ["cerrno"], "chrono": ["ratio"],
           "thread": ["chrono"], "future": ["chrono", "exception"], "condition_variable": ["chrono", "mutex"], "stdexcept": ["exception"], "new": ["exception"],
           "charconv": ["system_error"], "random": ["initializer_list"], "atomic": ["cstdint"], "bit": ["cstdint"]}
CONTAINERS = {"string", "string_view", "vector", "array", "map", "set", "unordered_map", "unordered_set", "deque", "list", "span", "optional", "variant", "tuple", "memory",
              "functional", "algorithm", "queue", "utility", "sstream", "filesystem", "thread", "mutex", "future", "iterator"}
# Names that are not reported in a file that includes a container's header: every such header declares them, or code that uses containers has them
# indirectly.
WITH_CONTAINERS = {"begin", "end", "size", "data", "empty", "rbegin", "rend", "cbegin", "cend", "move", "forward", "swap", "pair", "make_pair", "get", "initializer_list",
                   "nullptr_t", "next", "prev", "distance", "advance"}
KEYWORDS = set("alignas alignof and asm auto bool break case catch char class concept const consteval constexpr constinit continue decltype default delete do double else enum "
               "explicit extern false float for friend goto if inline int long namespace new noexcept not operator or private protected public requires return short signed "
               "sizeof static static_assert struct switch template this throw true try typedef typename union unsigned using virtual void volatile while defined".split())
# C headers -> the C++ headers that declare the same names.
C_HEADERS = {"stdint.h": "cstdint", "string.h": "cstring", "stdio.h": "cstdio", "stdlib.h": "cstdlib", "math.h": "cmath", "stddef.h": "cstddef", "errno.h": "cerrno",
             "signal.h": "csignal", "time.h": "ctime", "ctype.h": "cctype", "float.h": "cfloat"}
# POSIX functions, which sources call as ::open(), by header.
SYSTEM = {
    "fcntl.h": "open fcntl openat posix_fallocate", "unistd.h": "access chdir close dup dup2 execv execve execvp fdatasync fork fsync ftruncate getcwd geteuid getpid getppid "
    "getuid isatty link lseek pipe pread pwrite read readlink rmdir setsid sysconf unlink usleep write _exit pause alarm",
    "sys/stat.h": "chmod fstat lstat mkdir stat umask fchmod", "sys/mman.h": "mmap munmap mprotect madvise", "sys/wait.h": "wait waitpid",
    "sys/socket.h": "accept bind connect listen recv send setsockopt getsockopt shutdown socket socketpair", "poll.h": "poll", "dlfcn.h": "dladdr dlclose dlerror dlopen dlsym dlinfo",
    "sys/file.h": "flock", "signal.h": "kill sigaction sigprocmask", "pthread.h": "pthread_atfork pthread_self",
}
POSIX = {"accept", "bind", "close", "connect", "listen", "open", "pipe", "read", "recv", "remove", "send", "write"}
FIXED_WIDTH = re.compile(r"\b(?:u?int(?:8|16|32|64)_t|u?intptr_t|INT64_MAX|INT64_MIN|INT32_MAX|INT32_MIN|UINT64_MAX|UINT32_MAX|UINT16_MAX|UINT8_MAX|INT8_MAX|INT16_MAX)\b")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)
NAME = re.compile(r"(?P<before>(?:\w+\s*::\s*)*(?:::\s*)?|(?:\.|->)\s*)\b(?P<name>[A-Za-z_]\w*)\b(?P<call>\s*(?:<[^<>;(){}]*>)?\s*\()?")
# Regular expressions for the places at which a file declares a name of its own.
NAMING = (
    r"(?:\b(?:struct|class|enum|union|namespace|using|auto|concept|typename)|(?!\b(?:return|else|throw|case|co_return|new|not|and|or)\b)\b\w+[>&*\]]*)"
    r"[ \t\n]+[&*]*(\w+)\s*(?=[({=;,):\[<>])",
    r",\s*[&*]*(\w+)\s*(?=[=;,{])", r"\bTEST(?:_F|_P)?\(\w+,\s*(\w+)", r"#\s*define\s+(\w+)", r"#\s*define\s+.*##\s*(\w+)", r"[&*>]\s*(\w+)\s*(?=[,){;=(\[])",
    r"\[[^\]]*?(\w+)\s*=", r"[{,]\s*(\w+)\s*(?=[,}=])", r"\busing\s+[\w:]+::(\w+)\s*;")
PATHS = ("", "include/", "tests/", "python/src/", "tests/nn/")


def tables(lists):
    """Inverts lists of names by header: returns the headers of each name."""
    headers = {}
    for header, names in lists.items():
        for name in names.split():
            headers.setdefault(name, set()).add(header)
    return headers


class Tree:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.paths = {str(p) for p in check_odr.sources(root) if (self.root / p).exists()}
        self.raw = {p: (self.root / p).read_text(errors="replace") for p in self.paths}
        self.text = {p: check_odr.without_text(t) for p, t in self.raw.items()}
        self.direct = {p: self.includes(p) for p in self.paths}
        self.reached, self.folders, self.named = {}, {}, {}

    def includes(self, path):
        """Returns (project files, other headers) that a file includes."""
        own, other = set(), set()
        folder = path.rpartition("/")[0]
        backend = re.match(r"backends/\w+/", path)
        for kind, name in INCLUDE.findall(self.raw[path]):
            places = [f"{folder}/{name}", *(p + name for p in PATHS)] + ([backend.group(0) + name] if backend else []) + \
                ([f"backends/cuda/{name}"] if path.startswith(("tests/backends/cuda/", "bench/")) else [])
            found = next((place for place in map(self.plain, places) if place in self.paths), None)
            (own if found else other).add(found or C_HEADERS.get(name, name))
        return own, other

    @staticmethod
    def plain(path):
        parts = []
        for part in path.split("/"):
            if part == ".." and parts:
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        return "/".join(parts)

    def closure(self, path):
        """Returns the project files that a file includes directly or indirectly, and the other headers that any of these includes."""
        if path not in self.reached:
            files, headers, left = set(), set(), [path]
            while left:
                file = left.pop()
                if file in files:
                    continue
                files.add(file)
                own, other = self.direct[file]
                left += own
                headers |= other
            for header in list(headers):
                headers |= set(IMPLIED.get(header, ()))
            self.reached[path] = files, headers
        return self.reached[path]

    def beside(self, path):
        """Returns the project files that any file of the folder includes; in a unity build they may precede this file."""
        folder = path.rpartition("/")[0]
        if folder not in self.folders:
            self.folders[folder] = set().union(*(self.closure(p)[0] for p in self.paths if p.rpartition("/")[0] == folder))
        return self.folders[folder]

    def names_in(self, path):
        """Returns the names that a file declares as members, parameters, variables, forward declarations or the like."""
        if path not in self.named:
            text, raw = self.text[path], self.raw[path]
            self.named[path] = {name for name, _ in declared(text)}.union(*(set(re.findall(p, raw if "define" in p else text)) for p in NAMING))
        return self.named[path]

    def defined(self):
        """Returns the names that the project's headers define in namespaces, each with these headers and whether one of the definitions is a type."""
        names = {}
        for path in self.paths:
            if path.endswith((".h", ".hpp", ".cuh")):
                for name, kind in declared(self.text[path]):
                    places = names.setdefault(name, [set(), False])
                    places[0].add(path)
                    places[1] |= kind == "type"
        return names


def declared(text):
    """Yields (name, kind) of the declarations in namespaces of a header."""
    found, head, depth, spaces = [], "", 0, []
    for c in text:
        if c == "{":
            if depth == 0 and re.search(r"\bnamespace\b\s*[\w:\s]*$|extern\s*\"\"\s*$", head):
                spaces.append(head)
                head = ""
                continue
            if depth == 0:
                found += find_names(head)
            depth += 1
        elif c == "}":
            if depth > 0:
                depth -= 1
                head = "" if depth == 0 and "(" in head else head
            elif spaces:
                spaces.pop()
                head = ""
        elif c == ";" and depth == 0:
            found += find_names(head)
            head = ""
        elif depth == 0:
            head += c
    return found


def find_names(head):
    head = check_odr.strip_templates(re.sub(r"\[\[.*?\]\]|\\\n", "", head, flags=re.S))[0]
    alias = re.match(r"using\s+(\w+)\s*=", head)
    if alias:
        return [(alias.group(1), "type")]
    kind = re.match(r"(?:typedef\s+)?(?:struct|class|union|enum(?:\s+(?:class|struct))?)\s+(?:[A-Z_]+\s+(?=\w))?(\w+)\s*(?:final\s*)?(?::(?!:).*)?$", head, re.S)
    if kind:
        return [(kind.group(1), "type")]
    constant = re.match(r"(?:inline\s+|extern\s+|static\s+)*(?:constexpr|const)\b[^=({]*?\b(k[A-Z]\w*)\s*(?:\[[^\]]*\]\s*)*(?:[={(]|$)", head)
    if constant:
        return [(constant.group(1), "type")]
    if re.match(r"(?:using|friend|static_assert|typedef|struct|class|enum|template|concept)\b", head) or "operator" in head:
        return []
    key = check_odr.function_key(head) if "(" in head else None
    name = key.split("(")[0] if key else None
    return [(name, "function")] if name and re.fullmatch(r"\w+", name) else []


def used(text):
    """Yields (qualifier, name, whether it is called, line) of each name in a text."""
    for match in NAME.finditer(text):
        before = re.sub(r"\s", "", match.group("before"))
        first, colons, rest = before.partition("::")
        if first in KEYWORDS:  # as in return ::open()
            before = colons + rest
        yield before, match.group("name"), bool(match.group("call")), match.start("name")


def findings(root):
    tree, standard, system, result = Tree(root), tables(STANDARD), tables(SYSTEM), []
    project = tree.defined()
    spaces = {"te_fl"} | {part for text in tree.text.values() for chain in re.findall(r"\bnamespace\s+(?:\w+\s*=\s*)?([\w:]+)", text) for part in chain.split("::")}
    for path in sorted(tree.paths):
        if path.endswith((".c", ".h")) or path.startswith(("tests/abi/kept", "tests/tools/")) and "odr" in path:
            continue
        files, headers = tree.closure(path)
        text = tree.text[path]
        beside = tree.beside(path)
        known, seen = set().union(*(tree.names_in(f) for f in files if f != path)), set()
        local = tree.names_in(path)

        def report(name, at, what):
            if name not in seen:
                seen.add(name)
                result.append(f"{path}:{text.count(chr(10), 0, at) + 1}: {name} is used, and nothing that the file includes declares it: {what}")

        if FIXED_WIDTH.search(text) and not headers & {"cstdint", "cinttypes", "inttypes.h"} | (headers & {"cuda_runtime.h", "cuda.h"}):
            report("a fixed-width integer", FIXED_WIDTH.search(text).start(), "include <cstdint>")
        for before, name, called, at in used(text):
            if before.startswith("std::") or before == "std":
                parts = before.split("::")[1:-1]
                wanted = standard.get(f"{parts[0]}::*") if parts else standard.get(name)
                if wanted and not wanted & headers and not (name in WITH_CONTAINERS and headers & CONTAINERS):
                    report(f"std::{'::'.join([*parts, name])}", at, "include " + " or ".join(f"<{h}>" for h in sorted(wanted)))
            elif (before == "::" and called and (wanted := system.get(name))) or (before == "abi::" and (wanted := {"cxxabi.h"})):
                if not wanted & headers and not headers & {"Python.h"} and not (wanted & {"signal.h"} and "csignal" in headers):
                    report(name, at, "include " + " or ".join(f"<{h}>" for h in sorted(wanted)))
            elif before[:1] in (".", "-") or name in KEYWORDS or re.search(r">\s*::\s*$", text[max(0, at - 8):at]) or before.startswith(("std", "testing", "benchmark", "nlohmann", "hwy", "hn", "dnnl")):
                continue
            elif before and before.rstrip(":").rpartition("::")[2] not in spaces or name in POSIX:
                continue  # a member, or a name of another library
            elif name in project and (project[name][1] or called) and name not in known and name not in local and path not in project[name][0]:
                places = sorted(project[name][0] & beside)
                if places:
                    report(name, at, f"it is in {' and '.join(places[:3])}")
    return result


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent
    found = findings(root)
    print("\n".join(found) or "includes: every file includes what declares the names that it uses")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
