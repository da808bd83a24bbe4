"""usage: forkserver.py [-c PROGRAM | FILE] ARGUMENTS... Runs Python programs without the seconds that importing PyTorch takes; the arguments are
those of Python's command line. If TEST_FORKSERVER is set, as ctest does, the program runs in a fork of a server process that has imported PyTorch and
its compiler. Otherwise, or if PyTorch is not installed, it runs in an interpreter of its own.

The first call under a ctest process starts the server, which ends with that process. A fork gets the caller's environment, working folder, module
path and standard streams; the caller then exits with the fork's status or signal. Tests of an import's effects, of the order of imports, or of
variables that PyTorch reads at import must start sys.executable instead."""

import builtins
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import types

PYTHON = (sys.executable, os.path.abspath(__file__))  # command line that a test uses in place of sys.executable
CREDENTIALS = struct.Struct("3i")  # pid, user and group of a socket's peer


def socket_address(process):
    """Returns the abstract socket address of a process. It includes the process's start time, since the system may reuse the pid."""
    with open(f"/proc/{process}/stat") as file:
        begun = file.read().rpartition(")")[2].split()[19]
    return f"\0te-fl-tests-{os.getuid()}-{process}-{begun}"


def receive(connection, size):
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def call(arguments):
    """Sends the arguments to the server, which runs the program in a fork; then exits with the fork's status or signal. Returns if there is no
    server."""
    if os.environ["TEST_FORKSERVER"] == "1":
        os.environ["TEST_FORKSERVER"] = str(os.getppid())
    process = os.environ["TEST_FORKSERVER"]
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    connection = connect(process)
    try:
        socket.send_fds(connection, [struct.pack("Q", len(request))], [0, 1, 2])
        connection.sendall(request)
        receive(connection, 1)  # the fork has started
    except (EOFError, OSError):
        return  # the server has ended because it could not import PyTorch
    status, = struct.unpack("i", receive(connection, 4))
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def connect(process):
    address, connection = socket_address(process), socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(address)
            return connection
        except ConnectionRefusedError:
            begin(address, process)


def begin(address, process):
    """Starts the server, unless another call has already done so. Calls wait in the server's socket queue while it imports."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError:
            time.sleep(0.01)  # waits until the other call's server listens
            return
        listener.listen(64)
        subprocess.Popen([*PYTHON, "--serve", str(listener.fileno()), process], pass_fds=[listener.fileno()], start_new_session=True, cwd="/",
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Fork:
    def __init__(self, connection, child):
        self.connection, self.child = connection, child
        self.own_group()

    def own_group(self):
        try:
            os.setpgid(self.child, self.child)  # both parent and child set it, because either may run first
        except (PermissionError, ProcessLookupError):
            pass

    def kill(self):
        """Kills the child and its descendants."""
        try:
            os.killpg(self.child, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def answer(self):
        """Sends the child's exit status to the caller; returns False while the child runs."""
        child, status = os.waitpid(self.child, os.WNOHANG)
        if child:
            try:
                self.connection.sendall(struct.pack("i", status))
            except OSError:
                pass  # the caller was killed
            self.connection.close()
        return bool(child)


def serve(listener, process):
    """The server's loop: forks for each call, until the ctest process `process` has ended. Returns only in a fork, with the arguments to run."""
    import gc

    import torch
    import torch._dynamo.backends.debugging  # noqa: F401
    gc.collect()
    gc.freeze()  # keeps the forks' garbage collector from writing to shared pages
    folders = [folder for folder in sys.path[1:] if folder not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    address, forks = socket_address(process), []
    while runs(process, address):
        ready, _, _ = select.select([listener, *(fork.connection for fork in forks)], [], [], 0.02 if forks else 0.5)
        for fork in forks:
            if fork.connection in ready:
                fork.kill()  # the fork's caller was killed
        forks = [fork for fork in forks if not fork.answer()]
        if listener in ready:
            connection, _ = listener.accept()
            _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
            size, streams, _, _ = socket.recv_fds(connection, 8, 3)
            request = json.loads(receive(connection, *struct.unpack("Q", size)))
            child = os.fork() if user == os.getuid() else -1
            if child == 0:
                os.setpgid(0, 0)
                for other in (listener, connection, *(fork.connection for fork in forks)):
                    other.close()
                return enter(request, streams, folders)
            for stream in streams:
                os.close(stream)
            if child > 0:
                connection.sendall(b"1")
                forks.append(Fork(connection, child))
    for fork in forks:
        fork.kill()
    os._exit(0)


def runs(process, address):
    try:
        return socket_address(process) == address
    except OSError:
        return False


def enter(request, streams, folders):
    """Sets this process's environment, working folder, module path and standard streams to those of the caller."""
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments = request["arguments"]
    program = "" if arguments[0] == "-c" else os.path.dirname(os.path.abspath(arguments[0]))
    sys.path[:] = [program, *(f for f in os.environ.get("PYTHONPATH", "").split(os.pathsep) if f), *folders]
    return arguments


def run(arguments):
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    if arguments[0] == "-c":
        name, text, sys.argv = "<string>", arguments[1], ["-c", *arguments[2:]]
    else:
        name, sys.argv = os.path.abspath(arguments[0]), arguments
        main.__file__ = name
        with open(name, "rb") as file:
            text = file.read()
    server, sys.modules["__main__"] = sys.modules["__main__"], main  # noqa: F841  (its functions are below on the stack)
    exec(compile(text, name, "exec"), vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        run(serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3]))
    else:
        if "TEST_FORKSERVER" in os.environ:
            call(sys.argv[1:])
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
