"""Reads the file of measured GEMM algorithms that TE_FL_CUDA_GEMM_FILE names; see bench/README.md."""

import hashlib
import json
import os

FLAGS = ("bias", "residual", "accumulate", "bias_grad", "general")


class Choices:
    def __init__(self, path):
        self.path = path
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:  # no file yet, so no measured choices
            data = b'{"format": 1, "choices": []}'
        self.sha256 = hashlib.sha256(data).hexdigest()
        root = json.loads(data)
        if root["format"] != 1:
            raise ValueError(f"{path}: \"format\" is {root['format']}; this reads 1")
        self.all = root["choices"]

    @staticmethod
    def in_use():
        """Returns the choices that te-fl uses in this process, or None."""
        path = os.environ.get("TE_FL_CUDA_GEMM_FILE")
        return Choices(path) if path else None

    def find(self, device, library, m, n, k, flags=(), scaling="", power_limit=0, **fields):
        """Returns the measured algorithm for a GEMM on a device with a version of cuBLASLt, or None. scaling: of A and B by blocks,
        "2,2" or "2,3" (te_fl_scaling). power_limit: W that the device may draw, 0 if unknown. A choice measured at the same power limit is preferred
        to one measured at an unknown limit, as in the plugin (find_choice)."""
        other = None
        for choice in self.all:
            if choice["device"] != device or choice["cublaslt"] != library:
                continue
            words = choice["problem"].split()
            wanted = {f"m={m}", f"n={n}", f"k={k}", *(f"{name}={value}" for name, value in fields.items())}
            blocks = [w.split("=")[1] for w in words if w.startswith("scaling=")]
            if blocks != ([scaling] if scaling else []):
                continue
            if wanted <= set(words) and {w for w in words if w in FLAGS} == set(flags):
                limit = choice.get("power_limit_w", 0)
                if limit == power_limit:
                    return choice
                if other is None and 0 in (limit, power_limit):
                    other = choice
        return other


def make_product(problem):
    """Returns a short text with m x n x k and the other parameters of a choice's GEMM."""
    words = dict(w.split("=", 1) for w in problem.split() if "=" in w)
    side = f"{'t' if words['trans_a'] == '1' else 'n'}{'t' if words['trans_b'] == '1' else 'n'}"
    more = [w if "=" not in w else w.replace("=", " ") for w in problem.split()[1:]
            if "=" not in w or w.split("=")[0] in ("scaling", "align") and w != "align=256"]
    return f"{words['m']}x{words['n']}x{words['k']} {side} {words['a']} {words['b']} -> {words['d']} {' '.join(more)}".strip()


def table(choices):
    """Formats the measurements as lines: us of the heuristic's first candidate and of the choice."""
    rows = [("product", "heuristic us", "chosen us", "ratio", "timed", "differed", "chosen")]
    for c in choices:
        ratio = f"{c['us'] / c['heuristic_us']:.3f}" if c.get("heuristic_us", 0) > 0 else "-"
        rows.append((make_product(c["problem"]), f"{c['heuristic_us']:.1f}", f"{c['us']:.1f}", ratio, str(c["candidates"]),
                     str(c.get("different", 0)), c.get("config", "")))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) if i in (0, 6) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
            for row in rows]
