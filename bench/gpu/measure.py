"""Timing by paired alternation: graphs of many calls over rotating buffers, medians of ratios."""

import statistics
import subprocess
import time

import torch

L2_BYTES = 50 << 20
MIN_CALLS = 20


def sets_for(bytes_per_call):
    """Buffer sets that together exceed four times the L2 cache."""
    return max(2, -(-4 * L2_BYTES // max(1, bytes_per_call)) + 1)


class Graph:
    """`calls` of a rotating list of closures, captured once; falls back to plain launches where capture is refused."""

    def __init__(self, closures, calls=MIN_CALLS, capture=True, stream=None):
        self.calls = -(-max(calls, len(closures)) // len(closures)) * len(closures)
        self.closures, self.graph = closures, None
        self.stream = stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for closure in closures:
                closure()
        torch.cuda.synchronize()
        if capture:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for i in range(self.calls):
                    closures[i % len(closures)]()
            self.graph = graph

    def launch(self):
        if self.graph is not None:
            self.graph.replay()
        else:
            for i in range(self.calls):
                self.closures[i % len(self.closures)]()

    def time(self):
        """Microseconds per call of one launch."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / self.calls


class HostCalls:
    """As Graph, of calls on the host: for trying a benchmark where there is no GPU."""

    def __init__(self, closures, calls=MIN_CALLS):
        self.calls = -(-max(calls, len(closures)) // len(closures)) * len(closures)
        self.closures = closures

    def time(self):
        begin = time.perf_counter()
        for i in range(self.calls):
            self.closures[i % len(self.closures)]()
        return (time.perf_counter() - begin) * 1e6 / self.calls


def heat(seconds=2.0):
    """Products for that long, so that clocks and temperature are those of a chip at work."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def alternate(graphs, rounds):
    """{name: [us per call, one per round]}; every round times each of them once, in turn."""
    times = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.time()
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(graph.time())
    return times


def sustained(steps, seconds, block=0.25):
    """{name: [us per step, one per block]} of closures, alternating in blocks of about `block` seconds until each had
    `seconds`."""
    counts, times = {}, {name: [] for name in steps}
    def run(name, n):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(n):
            steps[name]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / n
    for name in steps:
        run(name, 3)
        counts[name] = max(1, int(block * 1e6 / run(name, 3)))
    for _ in range(max(2, round(seconds / block))):
        for name in steps:
            times[name].append(run(name, counts[name]))
    return times


def ratio(of, over):
    """Median of the paired ratios and its spread (half the distance between the quartiles)."""
    pairs = [a / b for a, b in zip(of, over)]
    if len(pairs) < 2:
        return pairs[0], 0.0
    quartiles = statistics.quantiles(pairs, n=4)
    return statistics.median(pairs), (quartiles[2] - quartiles[0]) / 2


def power_limit():
    """W that the first GPU may draw, 0 if nvidia-smi does not say."""
    try:
        told = subprocess.run(["nvidia-smi", "--query-gpu=enforced.power.limit", "--format=csv,noheader,nounits"], capture_output=True,
                              text=True, check=True).stdout.split()
        return round(float(told[0]))
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return 0


def cudnn_version():
    """PyTorch's cuDNN; the text of its complaint where the loader gives it another."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:
        return str(error)


def machine(library=None):
    """Device, versions, clocks, watts and throttle reasons, for the record. Versions are PyTorch's; `plugin` has those of the
    libraries that te-fl's plugin uses in this process, with their files."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"
    try:
        line = subprocess.run(["nvidia-smi", "--query-gpu=" + query, "--format=csv,noheader"], capture_output=True,
                              text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        line = "nvidia-smi does not answer"
    return {"gpu": dict(zip(query.split(","), [x.strip() for x in line.split(",")])), "torch": torch.__version__,
            "cuda": torch.version.cuda, "cudnn": cudnn_version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "plugin": library.findings() if library is not None else None}
