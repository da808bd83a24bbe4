"""The op specification: reads ops/*.yaml and ops/ids.txt, resolves the shorthand, reports errors. See ops/README.md."""
import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
DTYPES = ["f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "f4e2m1", "f8e8m0", "i8", "i16", "i32",
          "i64", "u8", "u16", "u32", "u64", "bool"]
GROUPS = {"high": ["f32", "f16", "bf16"], "fp8": ["f8e4m3", "f8e5m2"], "index": ["i32", "i64"],
          "any": DTYPES}
SCALING_WORDS = ["none", "tensor", "block1x128", "block128x128", "mxfp8", "nvfp4"]  # names of te_fl_scaling's values
SCALINGS = {"none": [0], "tensor": [1], "block": [2, 3], "mx": [4], "nv": [5]}
CLASSES = ("compute", "enquiry", "collective")
C_TYPES = {"bool": "int32_t", "i32": "int32_t", "i64": "int64_t", "f32": "float", "f64": "double"}
ARG_TYPES = {"tensor": "TENSOR", "list": "TENSOR_LIST", "bool": "BOOL", "i32": "I32", "i64": "I64",
             "f32": "F32", "f64": "F64", "enum": "ENUM", "saved": "SAVED", "communicator": "COMMUNICATOR",
             "ints": "I64_LIST"}
PY_TYPES = {"bool": "bool", "i32": "int", "i64": "int", "f32": "float", "f64": "float", "enum": "Union[int, str]"}  # Python types of scalar arguments
FLAG_KEYS = {"optional": "OPTIONAL", "host": "HOST", "raw_fp8": "RAW_FP8", "quant_only": "QUANT_ONLY",
             "overlap": "ALLOW_OVERLAP", "opaque": "OPAQUE", "strided_codes": "STRIDED_CODES",
             "later": "LATER"}
ARG_KEYS = {"name", "doc", "type", "role", "inout_if", "kept_if", "dtypes", "scalings", "shape", "same_as", "dtype_like", "alias",
            "default", "min", "max", "extents", "error", *FLAG_KEYS}
ERRORS = ("copy", "element", "sum", "rounded_sum")  # core::ErrorKind in core/op/op_error.hpp
OP_KEYS = {"name", "id", "summary", "formula", "source", "args", "template", "rng", "class", "rules",
           "gradient", "operations", "choice"}
CHOICE_KEYS = {"keys", "bias", "values", "map", "bits", "indices"}


class SpecError(Exception):
    pass


def need(condition, where, rule):
    if not condition:
        raise SpecError(f"{where}: {rule}")


class Arg:
    """One argument of an op; the constructor resolves the specification's shorthand."""

    def __init__(self, spec, where, enums):
        unknown = set(spec) - ARG_KEYS
        need(not unknown, where, f"unknown keys {sorted(unknown)}; known: {sorted(ARG_KEYS)}")
        self.name = spec["name"]
        where = f"{where}.{self.name}"
        need(spec.get("doc"), where, "needs a doc")
        self.doc = spec["doc"]
        kind = spec.get("type", "tensor")
        self.enum = kind[5:] if kind.startswith("enum:") else None
        self.type = "enum" if self.enum else kind
        need(self.type in ARG_TYPES, where, f"type {kind!r} is none of {sorted(ARG_TYPES)}")
        need(not self.enum or self.enum in enums, where, f"enum {self.enum!r} is not defined")
        self.is_tensor = self.type in ("tensor", "list")
        self.is_list = self.type in ("list", "ints")
        self.is_scalar = self.type in PY_TYPES
        self.role = spec.get("role", "in")
        need(self.role in ("in", "out", "inout"), where, f"role {self.role!r} is none of in, out, inout")
        need(not self.is_tensor or ("dtypes" in spec and "shape" in spec), where, "a tensor needs dtypes and shape")
        self.shape = spec.get("shape", "")
        self.dtypes = [d for g in spec.get("dtypes", []) for d in GROUPS.get(g, [g])]
        for d in self.dtypes:
            need(d in DTYPES, where, f"dtype {d!r} is none of {DTYPES} or {sorted(GROUPS)}")
        scalings = spec.get("scalings", ["none"])
        self.scaling_names = list(SCALINGS) if scalings == "all" else scalings
        self.scalings = sum(1 << s for n in self.scaling_names for s in SCALINGS[n]) if self.is_tensor else 0
        self.flags = [f"TE_FL_ARG_{FLAG_KEYS[k]}" for k in FLAG_KEYS if spec.get(k)]
        self.same_as = spec.get("same_as")
        if self.same_as:
            self.flags.append("TE_FL_ARG_SAME_DTYPE")
        self.dtype_like = spec.get("dtype_like")
        need(not self.dtype_like or (self.role == "out" and not self.same_as), where, "dtype_like is for role out, without same_as")
        self.optional, self.host = bool(spec.get("optional")), bool(spec.get("host"))
        # An output that te_fl.ops can allocate; see OpBinding::outputs in python/src/ops/op_binding.hpp.
        self.allocated = self.role == "out" and self.type == "tensor" and not self.host and not spec.get("quant_only")
        self.inout_if = spec.get("inout_if")
        self.kept_if = spec.get("kept_if")
        need(self.type != "ints" or self.role == "in", where, "a list of integers has role in")
        need(not self.kept_if or self.role == "out", where, "kept_if is for role out")
        self.alias = spec.get("alias", [])
        self.error = spec.get("error", "sum")
        need(self.error in ERRORS, where, f"error {self.error!r} is none of {ERRORS}")
        need("error" not in spec or (self.is_tensor and self.role != "in"), where, "error is for a tensor that the op writes")
        self.extents = spec.get("extents")
        need(not self.extents or self.role == "out", where, "extents are for role out")
        self.default = spec.get("default", 0)
        self.min, self.max = spec.get("min", 0), spec.get("max", 0)
        self.later = bool(spec.get("later"))
        self.enum_names = enums[self.enum] if self.enum else []
        if self.enum:
            self.min, self.max = 0, len(self.enum_names) - 1

    def c_members(self):
        if self.type == "tensor":
            return [("const te_fl_tensor*", self.name, "NULL")]
        if self.type == "list":
            return [("const te_fl_tensor* const*", self.name, "NULL"), ("int64_t", f"{self.name}_count", "0")]
        if self.type == "ints":
            return [("const int64_t*", self.name, "NULL"), ("int64_t", f"{self.name}_count", "0")]
        if self.type == "saved":
            return [("te_fl_saved*", self.name, "NULL")]
        if self.type == "communicator":
            return [("const te_fl_communicator*", self.name, "NULL")]
        ctype = "int32_t" if self.type == "enum" else C_TYPES[self.type]
        return [(ctype, self.name, self.c_default())]

    def c_default(self):
        if self.type in ("f32", "f64"):
            text = repr(float(self.default))
            return text + ("f" if self.type == "f32" else "")
        return str(int(self.default))


COMPARISONS = ("<", "<=", ">", ">=", "==", "!=", "multiple_of")


class Rules:
    """Checks the rules between an op's arguments and resolves their groups; te_fl_op_schema in include/te_fl/plugin.h documents the grammar."""

    def __init__(self, args, where):
        self.by_name, self.where = {a.name: a for a in args}, where
        # The names of shape rules that rules may use: those of plain tensors, of which a call has one value each.
        self.extents = {name for a in args if a.type == "tensor" for name in rule_names(a.shape)} - {"..."}
        both = sorted(self.extents & set(self.by_name))
        need(not both, where, f"{both} are arguments and names in shape rules")

    def type_of(self, name):
        return self.by_name[name].type if name in self.by_name else None

    def check_operand(self, word, where):
        listed = re.fullmatch(r"sum\((\w+)\)", word)
        scalar = word in self.by_name and self.by_name[word].is_scalar
        need(scalar or word in self.extents or re.fullmatch(r"-?\d+(\.\d+)?", word) or (listed and self.type_of(listed[1]) == "ints"), where,
             f"{word!r} is neither a number, a scalar argument, a name of a tensor's shape rule nor the sum of a list of integers")

    def check_comparison(self, words, at, where):
        sides = words[:at], words[at + 1:]
        if all(len(side) == 1 and self.type_of(side[0]) == "ints" for side in sides):
            return
        for side in sides:
            need(len(side) % 2 == 1 and set(side[1::2]) <= {"+", "-", "*"}, where, f"{' '.join(side)!r} is no sum of products")
            for word in side[::2]:
                self.check_operand(word, where)

    def check_condition(self, text, where):
        """Returns one condition of a rule, with its groups resolved."""
        words = text.split()
        compared = [i for i, word in enumerate(words) if word in COMPARISONS]
        if compared:
            self.check_comparison(words, compared[0], where)
            return " ".join(words)
        need(words and words[0] in self.by_name, where, f"{text!r} does not begin with an argument's name")
        arg = self.by_name[words[0]]
        if len(words) == 3 and words[1] == "is":
            chosen = [d for w in words[2].split("|") for d in {**GROUPS, "block": SCALING_WORDS[2:4]}.get(w, [w])]
            known = arg.enum_names if arg.enum else DTYPES + SCALING_WORDS if arg.type == "tensor" else []
            need(set(chosen) <= set(known), where, f"'{words[2]}' is none of {arg.name}'s: {known}")
            return f"{arg.name} is {'|'.join(chosen)}"
        if len(words) == 3 and words[1] == "fits":
            need(arg.is_scalar and self.type_of(words[2]) == "tensor", where, "must be 'NUMBER fits TENSOR'")
        elif words[1:2] == ["holds"]:
            times = len(words) == 5 and words[3] == "times" and self.type_of(words[2]) == "communicator"
            right = len(words) == 3 and (self.type_of(words[2]) == "list" or words[2].isdigit())
            need(arg.type == "tensor" and (right or ((len(words) == 3 or times) and self.type_of(words[-1]) == "tensor")), where,
                 "must be 'A holds B', 'A holds NUMBER' or 'A holds COMMUNICATOR times B'")
        else:
            need(len(words) == 1, where, f"'{text}' is not a condition")
        return " ".join(words)

    def check(self, rule):
        """Returns a rule with its groups resolved."""
        where = f"{self.where}, rule \"{rule}\""
        need("; " not in rule, where, "must not contain '; ', which separates rules")
        text, explanation = re.fullmatch(r"(.*?)( \(.*\))?", rule).groups()
        m = re.fullmatch(r"(.+?) (requires|excludes) (.+)", text)
        conditions = [self.check_condition(c, where) for c in (m[3] if m else text).split(" or ")]
        if m is None:
            need(len(conditions) > 1 or " " in text, where, "must be 'A requires B', 'A excludes B', 'A or B', 'A is B', 'A holds B' or a comparison")
        need(m is None or m[2] == "requires" or len(conditions) == 1, where, "excludes takes one condition; write one rule for each")
        return (f"{self.check_condition(m[1], where)} {m[2]} " if m else "") + " or ".join(conditions) + (explanation or "")


def rule_names(shape):
    """Returns the names in a shape rule, "..." among them; an "@..." form, which stands for a product of extents, counts as "..."."""
    words = [w for part in shape.split(" : ") for w in part.split(" ? ")[-1].split() if w[0] != "#"]
    return [n for w in words for n in (["..."] if "..." in w else re.findall(r"[A-Za-z]\w*", w)) if n != "any"]


class Op:
    def __init__(self, spec, family, templates, enums):
        where = f"{family}.{spec.get('name', '?')}"
        unknown = set(spec) - OP_KEYS
        need(not unknown, where, f"unknown keys {sorted(unknown)}; known: {sorted(OP_KEYS)}")
        for key in ("name", "summary", "formula", "source"):
            need(spec.get(key), where, f"needs {key}")
        need(("args" in spec) != ("template" in spec), where, "needs args or template, not both")
        spec = {**templates.get(spec.get("template"), {}), **spec}
        self.name, self.family = spec["name"], family
        self.summary, self.formula, self.source = spec["summary"], spec["formula"], spec["source"]
        self.rng, self.op_class = bool(spec.get("rng")), spec.get("class", "compute")
        need(self.op_class in CLASSES, where, f"class {self.op_class!r} is none of {CLASSES}")
        self.id = spec.get("id")
        need(isinstance(self.id, int) and self.id >= 0, where, "needs an id: the next free number of ops/ids.txt")
        self.template = spec.get("template")
        self.args = [Arg(a, where, enums) for a in spec["args"]]
        self.struct = f"te_fl_{self.template or self.name}_args"
        names = [a.name for a in self.args]
        need(len(names) == len(set(names)), where, "two arguments have one name")
        for a in self.args:
            for ref in [a.same_as, a.dtype_like, a.inout_if, a.kept_if, *a.alias]:
                need(ref is None or ref in names, f"{where}.{a.name}", f"refers to {ref!r}, which is no argument")
        later = [a.later for a in self.args]
        need(later == sorted(later), where, "later arguments must come last")
        self.rules = [Rules(self.args, where).check(rule) for rule in spec.get("rules", [])]
        self.check_extents(where)
        self.choice = spec.get("choice")
        for key, name in (self.choice or {}).items():
            need(key in CHOICE_KEYS and name in names, where, f"choice: {key}: {name} is no part of a choice, or no argument")
        need(not self.choice or {"keys", "map", "bits"} <= set(self.choice), where, "choice needs keys, map and bits")
        self.operations = spec.get("operations")
        self.check_operations(where)
        # gradient: name of the backward op. The dicts are keyed by its arguments: `grads` has the output of this op whose gradient the argument takes,
        # `saves` the argument of this op that it takes, `results` the input of this op whose gradient it writes. resolve_gradient() separates them.
        self.gradient, self.grads, self.saves, self.results = None, {}, {}, {}
        if spec.get("gradient"):
            m = re.fullmatch(r"(\w+)\((.*)\)", spec["gradient"])
            need(m, where, f"gradient {spec['gradient']!r} is not 'OP(ARG, THEIRS=OURS, THEIRS=d(OURS), ...)'")
            self.gradient = m[1]
            for word in filter(None, m[2].split(", ")):
                theirs, _, ours = word.partition("=")
                self.saves[theirs] = ours or theirs

    def check_extents(self, where):
        """Checks that an output's extents follow from names that inputs bind, or that the output's entry states a rule."""
        bound = {name for a in self.args if a.role != "out" for name in rule_names(a.shape)}
        for a in self.args:
            if a.role != "out" or a.type == "list" or not a.is_tensor or a.host:
                continue
            free = [n for n in rule_names(a.shape) if n not in bound]
            vague = a.shape == "any" or "_" in a.shape.split() or bool(free)
            need(not vague or a.extents, f"{where}.{a.name}",
                 f"its shape rule {a.shape!r} does not say how its extents follow from the inputs; add extents")
            need(vague or not a.extents, f"{where}.{a.name}", f"its shape rule {a.shape!r} says its extents; drop the key")

    def check_operations(self, where):
        names = {n for a in self.args for n in rule_names(a.shape)}
        # The names in `operations` must occur in shape rules. If all shapes are "any" (attention, whose layout is an argument), they are the names of
        # the docs and are not checked.
        for word in re.findall(r"[A-Za-z_]\w*", self.operations or ""):
            need(word in names or not names, where, f"operations: {word!r} is no name of a shape rule")

    def resolve_gradient(self, ops):
        if self.gradient is None:
            return
        need(self.gradient in ops, self.name, f"its gradient {self.gradient!r} is no op")
        mine, theirs = {a.name: a for a in self.args}, {a.name: a for a in ops[self.gradient].args}
        for their, our in list(self.saves.items()):
            need(their in theirs, self.name, f"{self.gradient} has no argument {their!r}")
            derivative = re.fullmatch(r"d\((\w+)\)", our)
            if derivative:
                written = theirs[their].role != "in"
                del self.saves[their]
                (self.results if written else self.grads)[their] = our = derivative[1]
                need(our in mine and (mine[our].role == "in") == written, self.name,
                     f"its gradient's {their}=d({our}) needs an {'input' if written else 'output'} of the op")
            need(our in mine, self.name, f"its gradient is given {our!r}, which is none of its arguments")
        named = {*self.grads, *self.saves, *self.results}
        for a in ops[self.gradient].args:
            need(a.is_scalar or a.optional or a.name in named, self.name, f"its gradient says nothing of {self.gradient}'s argument {a.name!r}")


class Ids:
    """All op ids ever issued (ops/ids.txt), each with the op's name. Ids are never reused, because compiled programs contain them."""

    def __init__(self, text):
        self.notes = [line for line in text.splitlines() if line.startswith("#")]
        self.issued = {}  # id -> (name, retired)
        for line in text.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            m = re.fullmatch(r"(\d+) (\w+)( retired)?", line)
            need(m, "ops/ids.txt", f"{line!r} is not 'ID NAME' or 'ID NAME retired'")
            number = int(m[1])
            need(number not in self.issued, "ops/ids.txt", f"id {number} appears twice")
            need(not self.issued or number > max(self.issued), "ops/ids.txt", f"id {number} must be greater than those before it")
            self.issued[number] = (m[2], bool(m[3]))
        live = [name for name, retired in self.issued.values() if not retired]
        need(len(live) == len(set(live)), "ops/ids.txt", "a name has two ids of which none is retired")

    def check(self, ops):
        """Reports ops whose ids contradict the list, and adds the ids of new ops."""
        known, last = {name: i for i, (name, retired) in self.issued.items() if not retired}, max(self.issued, default=-1)
        taken = {}
        for op in ops:
            other = taken.setdefault(op.id, op.name)
            need(other == op.name, op.name, f"id {op.id} is that of {other}; the next free one is {max([last, *taken]) + 1}")
        for op in ops:
            if op.id in self.issued:
                name, retired = self.issued[op.id]
                need(not retired, op.name, f"id {op.id} was {name}'s and is retired; ids are never given again")
                need(name == op.name, op.name, f"id {op.id} is that of {name} in ops/ids.txt; ids are never given again")
            else:
                need(op.name not in known, op.name,
                     f"its id was {known.get(op.name)} and is {op.id} now; programs have it inlined, so it stays")
                need(op.id > last, op.name, f"id {op.id} must be greater than all in ops/ids.txt; the next free one is {last + 1}")
        names = {op.name for op in ops}
        for name, number in known.items():
            need(name in names, name, f"has id {number} in ops/ids.txt and no entry; mark it 'retired' there, its line stays")
        for op in sorted(ops, key=lambda o: o.id):
            self.issued.setdefault(op.id, (op.name, False))

    def text(self):
        lines = [f"{i} {name}{' retired' if retired else ''}" for i, (name, retired) in self.issued.items()]
        return "\n".join(self.notes + lines) + "\n"


def load(folder=ROOT / "ops"):
    """Loads the specification: the families (name, summary, ops), the enums, and the list of ids with those of new ops added."""
    families, enums, raw = [], {}, []
    for path in sorted(folder.glob("*.yaml")):
        doc = yaml.safe_load(path.read_text())
        raw.append(doc)
        enums.update(doc.get("enums", {}))
    for doc in raw:
        # A template is a list of arguments, or a mapping with args and further keys that its ops share.
        templates = {k: v if isinstance(v, dict) else {"args": v} for k, v in doc.get("templates", {}).items()}
        # The struct of a template is named after family and template, so that names of different families cannot collide.
        renamed = {f"{doc['family']}_{k}": v for k, v in templates.items()}
        for op in doc["ops"]:
            if "template" in op:
                need(op["template"] in templates, op["name"], f"template {op['template']!r} is not defined")
                op["template"] = f"{doc['family']}_{op['template']}"
        ops = [Op(o, doc["family"], renamed, enums) for o in doc["ops"]]
        families.append((doc["family"], doc["summary"], ops))
    names = [o.name for _, _, ops in families for o in ops]
    need(len(names) == len(set(names)), "ops", "two ops have one name")
    by_name = {o.name: o for _, _, ops in families for o in ops}
    for op in by_name.values():
        op.resolve_gradient(by_name)
    ids = Ids((folder / "ids.txt").read_text())
    ids.check([o for _, _, ops in families for o in ops])
    return families, enums, ids
