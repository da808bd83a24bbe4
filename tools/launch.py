#!/usr/bin/env python3
"""Starts the ranks of a job on this machine: N processes of one program, with the variables TE_FL_RANK, TE_FL_WORLD_SIZE,
TE_FL_LOCAL_RANK, TE_FL_STORE and LOCAL_WORLD_SIZE. Each line of their output is prefixed with the rank: "[2] loss 1.7".

The exit code is that of the rank that failed first, 128 + N if signal N ended it, and 0 if none failed. When a rank fails, the others
have --grace seconds to end by themselves, because their communicators fail with COMM_FAILED; those that remain get SIGTERM, and SIGKILL
5 seconds later. Ctrl-C is passed on to every rank; a second Ctrl-C kills them.

  tools/launch.py -n 4 -- build/release/bin/train_gpt --tp 2 --dp 2
  tools/launch.py -n 2 --store tcp -- python3 train.py"""
import argparse
import ctypes
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

KILL_AFTER_S = 5
DRAIN_S = 2  # seconds to read a rank's output after its end; the rank's own children may keep its pipes open longer
PR_SET_PDEATHSIG = 1


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="%(prog)s -n N [--store ADDRESS] [--grace SECONDS] -- PROGRAM [ARGS ...]")
    parser.add_argument("-n", type=int, required=True, metavar="N", help="how many ranks there are")
    parser.add_argument("--store", default="file", metavar="ADDRESS",
                        help="where the ranks find each other: 'file', a temporary folder, which is removed at the end (the default); 'tcp', a "
                        "free port of this machine; or an address for TE_FL_STORE: file:PATH, PATH being absent or empty, or tcp://HOST:PORT")
    parser.add_argument("--grace", type=float, default=10, metavar="SECONDS",
                        help="how long the other ranks may go on after one has failed (10)")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="the program and its arguments, behind --")
    options = parser.parse_args()
    options.program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not options.program:
        parser.error("no program is given: put it behind --, as in  -n 2 -- ./train --steps 10")
    if options.n < 1:
        parser.error(f"-n {options.n}: there is at least one rank")
    if options.grace < 0:
        parser.error(f"--grace {options.grace:g}: seconds are not negative")
    if options.store not in ("file", "tcp") and not options.store.startswith(("file:", "tcp://")):
        parser.error(f"--store {options.store}: it must be file, tcp, file:PATH or tcp://HOST:PORT")
    return options


def store_address(wanted, folder):
    if wanted == "file":
        return f"file:{folder}/store"
    if wanted == "tcp":
        with socket.create_server(("127.0.0.1", 0)) as probe:  # finds a free port; if another program takes the port first, rank 0 reports that
            return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    return wanted


def environment(rank, size, store):
    # defaults, which the caller's variables override
    shared = {"TE_FL_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)), "PYTHONUNBUFFERED": "1"}
    return {**shared, **os.environ, "TE_FL_RANK": str(rank), "TE_FL_WORLD_SIZE": str(size), "TE_FL_LOCAL_RANK": str(rank), "TE_FL_STORE": store,
            "LOCAL_WORLD_SIZE": str(size)}  # number of ranks on this machine, under torchrun's name


def exit_code(returncode):
    return 128 - returncode if returncode < 0 else returncode


def how(returncode):
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def say(text):
    print(f"launch.py: {text}", file=sys.stderr, flush=True)


class Job:
    def __init__(self, options, store):
        self.options, self.store = options, store
        # (rank, return code), or a signal's number, in order of arrival; a SimpleQueue, so that signal handlers may put
        self.ended = queue.SimpleQueue()
        self.processes, self.readers = [], []
        self.write_lock = threading.Lock()
        self.interrupts = 0

    def start(self):
        libc, parent = ctypes.CDLL(None), os.getpid()

        def in_child():  # makes the rank die with the launcher, even if the launcher is killed
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        for rank in range(self.options.n):
            process = subprocess.Popen(self.options.program, env=environment(rank, self.options.n, self.store), stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=in_child)
            self.processes.append(process)
            for pipe, out in (process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer):
                self.readers.append(threading.Thread(target=self.copy_lines, args=(rank, pipe, out), daemon=True))
                self.readers[-1].start()
            threading.Thread(target=lambda r=rank, p=process: self.ended.put((r, p.wait())), daemon=True).start()

    def copy_lines(self, rank, pipe, out):
        for line in pipe:
            with self.write_lock:
                try:
                    out.write(f"[{rank}] ".encode() + line + (b"" if line.endswith(b"\n") else b"\n"))
                    out.flush()
                except OSError:  # the reader of our output has gone; go on reading so that the rank does not block
                    pass

    def send(self, number, running):
        for rank in running:
            try:
                os.killpg(self.processes[rank].pid, number)
            except ProcessLookupError:
                pass

    def interrupt(self, number, running):
        self.interrupts += 1
        self.send(signal.SIGKILL if self.interrupts > 1 else number, running)

    def wait(self):
        """Waits for all ranks; returns the failed ranks in the order of failure, with their return codes."""
        running, failed, steps, hurried = set(range(self.options.n)), [], [], False
        while running:
            try:
                event = self.ended.get(timeout=max(0, steps[0][0] - time.monotonic()) if steps else None)
            except queue.Empty:
                _, number = steps.pop(0)
                say(f"rank {', '.join(map(str, sorted(running)))} has not ended; sending {number.name}")
                self.send(number, running)
                continue
            if isinstance(event, int):
                self.interrupt(event, running)
            else:
                running.remove(event[0])
                if event[1] != 0:
                    failed.append(event)
            if (failed or self.interrupts) and running and not hurried:
                hurried = True
                if failed:
                    say(f"rank {failed[0][0]} {how(failed[0][1])}; the others have {self.options.grace:g} s to end")
                end = time.monotonic() + self.options.grace
                steps = [(end, signal.SIGTERM), (end + KILL_AFTER_S, signal.SIGKILL)]
        deadline = time.monotonic() + DRAIN_S
        for reader in self.readers:
            reader.join(max(0, deadline - time.monotonic()))
        return failed


def run(options, folder):
    job = Job(options, store_address(options.store, folder))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: job.ended.put(received))
    try:
        job.start()
    except OSError as error:
        job.send(signal.SIGKILL, range(len(job.processes)))
        say(f"{options.program[0]} cannot be started: {error.strerror}")
        return 127
    failed = job.wait()
    if not failed:
        return 0
    (rank, code), others = failed[0], failed[1:]
    say(f"rank {rank} failed first: it {how(code)}" + "".join(f"; rank {other} {how(c)}" for other, c in others))
    return exit_code(code)


def main():
    options = arguments()
    folder = tempfile.mkdtemp(prefix="te_fl_job.")
    try:
        return run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
