"""Paired timing: CUDA graphs of many calls over rotating buffers alternate, and results are medians of ratios."""

import statistics
import subprocess
import time

import torch

L2_BYTES = 50 << 20
MIN_CALLS = 20


def sets_for(bytes_per_call):
    """Returns the number of buffer sets that together exceed four times the L2 cache."""
    return max(2, -(-4 * L2_BYTES // max(1, bytes_per_call)) + 1)


class Graph:
    """A CUDA graph of `calls` calls that rotate through a list of closures, captured once; uses plain launches if capture fails."""

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
        """Launches once; returns microseconds per call."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / self.calls


class HostCalls:
    """Runs the calls on the host, with Graph's interface, to try a benchmark without a GPU."""

    def __init__(self, closures, calls=MIN_CALLS):
        self.calls = -(-max(calls, len(closures)) // len(closures)) * len(closures)
        self.closures = closures

    def time(self):
        begin = time.perf_counter()
        for i in range(self.calls):
            self.closures[i % len(self.closures)]()
        return (time.perf_counter() - begin) * 1e6 / self.calls


def heat(seconds=2.0):
    """Runs matrix products for `seconds`, so that the chip has the clocks and temperature of sustained work."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def alternate(graphs, rounds):
    """Times each graph once per round, in turn; returns {name: [us per call, one per round]}."""
    times = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.time()
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(graph.time())
    return times


def sustained(steps, seconds, block=0.25):
    """Alternates the closures in blocks of about `block` seconds until each has run for `seconds`; returns {name: [us per step, one per block]}."""
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
    """Returns the median of the paired ratios and its spread (half the interquartile range)."""
    pairs = [a / b for a, b in zip(of, over)]
    if len(pairs) < 2:
        return pairs[0], 0.0
    quartiles = statistics.quantiles(pairs, n=4)
    return statistics.median(pairs), (quartiles[2] - quartiles[0]) / 2


def power_limit():
    """Returns the power limit of the first GPU in W, or 0 if nvidia-smi does not report one."""
    try:
        told = subprocess.run(["nvidia-smi", "--query-gpu=enforced.power.limit", "--format=csv,noheader,nounits"], capture_output=True,
                              text=True, check=True).stdout.split()
        return round(float(told[0]))
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return 0


def cudnn_version():
    """Returns the version of PyTorch's cuDNN, or PyTorch's error text if the loader found another cuDNN."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError as error:
        return str(error)


def machine(library=None):
    """Describes the machine: device, versions, clocks, watts and throttle reasons. Versions are PyTorch's; `plugin` lists the libraries that te-fl's
    plugin uses in this process, with version and file."""
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
