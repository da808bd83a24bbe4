"""Keeps the process's handlers of signals: LLVM, inside of Triton, takes those of most signals when it first compiles something, and an op
may not leave that behind (te-fl's rule R8). It does so once in a process."""

import ctypes
import functools
import signal

_SIGNALS = [getattr(signal, "SIG" + name) for name in "HUP INT TERM USR1 USR2 ILL TRAP ABRT FPE BUS SEGV QUIT SYS XCPU XFSZ".split()]
_libc = ctypes.CDLL(None)
_Action = ctypes.c_char * 256  # more than any struct sigaction
_given_back = False


class _Place(ctypes.Structure):  # Dl_info
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)]


def _action(number):
    """The signal's struct sigaction."""
    found = _Action()
    _libc.sigaction(number, None, found)
    return found


def _handler(action):
    return ctypes.c_void_p.from_buffer(action).value  # its first member


def _is_tritons(action):
    place, handler = _Place(), _handler(action)
    return bool(handler) and _libc.dladdr(ctypes.c_void_p(handler), ctypes.byref(place)) != 0 and b"libtriton" in place.file


def kept(function):
    """The function, after which the handlers are those of before it."""
    @functools.wraps(function)
    def run(*arguments, **named):
        global _given_back
        if _given_back:
            return function(*arguments, **named)
        before = {number: _action(number) for number in _SIGNALS}
        try:
            return function(*arguments, **named)
        finally:
            if _handler(_action(signal.SIGINT)) != _handler(before[signal.SIGINT]):
                for number, action in before.items():
                    if _is_tritons(_action(number)) and not _is_tritons(action):
                        _libc.sigaction(number, action, None)
                        _given_back = True
    return run
