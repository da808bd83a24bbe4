"""Exceptions of te-fl. Each carries te-fl's text: the value, the rule and the way out."""


def did_you_mean(name: str, known) -> str:
    """"; did you mean 'x'?", or nothing where no known name is near."""
    import difflib  # here, since `import te_fl` needs none of it
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


class Error(RuntimeError):
    """Any failure that te-fl reports."""


class InvalidArgument(Error, ValueError):
    """A call that breaks a rule of the op or function."""


class Unsupported(Error, NotImplementedError):
    """No implementation serves the call; the text lists each with its reason."""


class NotFound(Error, LookupError):
    """No op, plugin, device or file has this name; the text names the nearest."""


class AlreadyExists(Error, ValueError):
    """The name is taken."""


class OutOfMemory(Error, MemoryError):
    """Memory of a device or of the host ran out."""


class FailedPrecondition(Error):
    """Something else must be done first."""


class Incompatible(Error):
    """A plugin or a library of another version."""


class Busy(Error):
    """Still in use."""


class Timeout(Error, TimeoutError):
    """A plugin took longer than it may."""


class DeviceLost(Error):
    """The device does no work any more."""


class DataLoss(Error):
    """A file is damaged."""


class Internal(Error):
    """A mistake of te-fl's or of a plugin's."""


class CommFailed(Error):
    """Another rank is gone, or late, or did something else."""


BY_CODE = {
    "INVALID_ARGUMENT": InvalidArgument,
    "UNSUPPORTED": Unsupported,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "OUT_OF_MEMORY": OutOfMemory,
    "FAILED_PRECONDITION": FailedPrecondition,
    "INCOMPATIBLE": Incompatible,
    "BUSY": Busy,
    "TIMEOUT": Timeout,
    "DEVICE_LOST": DeviceLost,
    "DATA_LOSS": DataLoss,
    "INTERNAL": Internal,
    "COMM_FAILED": CommFailed,
}
