"""te-fl's exceptions. Each message gives the value, the violated rule, and a remedy."""

import re


def did_you_mean(name: str, known) -> str:
    """The text "; did you mean 'x'?", or "" if no known name is similar."""
    import difflib  # imported here to keep `import te_fl` fast
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to the error. Python 3.10 has no notes: there the text becomes part of the message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = ("\n".join([*map(str, error.args[:1]), note]), *error.args[1:])


class Error(RuntimeError):
    """Any failure that te-fl reports. str() begins with the status code of the class, which the arguments do not contain."""

    code = ""

    def __str__(self) -> str:
        return f"{self.code}: {super().__str__()}" if self.code else super().__str__()


class InvalidArgument(Error, ValueError):
    """A call that breaks a rule of the op or function."""


class Unsupported(Error, NotImplementedError):
    """No implementation supports the call; the message lists each with its reason."""


class NotFound(Error, LookupError):
    """No op, plugin, device or file has this name; the message gives the most similar name."""


class AlreadyExists(Error, ValueError):
    """The name is already in use."""


class OutOfMemory(Error, MemoryError):
    """Device or host memory is exhausted."""


class FailedPrecondition(Error):
    """An operation is not possible in the current state; the message says what must be done first."""


class Incompatible(Error):
    """A plugin or library has an incompatible version."""


class Busy(Error):
    """The object is still in use."""


class Timeout(Error, TimeoutError):
    """A plugin exceeded its time limit."""


class DeviceLost(Error):
    """The device has stopped working."""


class DataLoss(Error):
    """A file is corrupt."""


class Internal(Error):
    """A bug in te-fl or in a plugin."""


class CommFailed(Error):
    """Another rank has ended, exceeded a time limit, or made a different call."""


BY_CODE = {re.sub("(?<!^)([A-Z])", r"_\1", kind.__name__).upper(): kind for kind in Error.__subclasses__()}
for _code, _kind in BY_CODE.items():
    _kind.code = _code
