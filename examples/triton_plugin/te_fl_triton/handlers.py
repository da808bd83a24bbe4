"""Restores the process's signal handlers. LLVM, which Triton uses, replaces most signal handlers at its first compilation in a process, and an
op must not change them (te-fl's rule R8)."""

import ctypes
import functools
import signal

_SIGNALS = [getattr(signal, "SIG" + name) for name in "HUP INT TERM USR1 USR2 ILL TRAP ABRT FPE BUS SEGV QUIT SYS XCPU XFSZ".split()]
_libc = ctypes.CDLL(None)
_Action = ctypes.c_char * 256  # larger than struct sigaction on any platform
_given_back = False


class _Place(ctypes.Structure):  # Dl_info
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)]


def _action(number):
    """Returns the signal's current struct sigaction."""
    found = _Action()
    _libc.sigaction(number, None, found)
    return found


def _handler(action):
    return ctypes.c_void_p.from_buffer(action).value  # the first member of the struct


def _is_tritons(action):
    place, handler = _Place(), _handler(action)
    return bool(handler) and _libc.dladdr(ctypes.c_void_p(handler), ctypes.byref(place)) != 0 and b"libtriton" in place.file


def kept(function):
    """Wraps `function` so that the signal handlers are restored after the call."""
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
