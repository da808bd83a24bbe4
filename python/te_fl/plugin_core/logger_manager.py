"""transformer_engine.plugin.core.logger_manager: a logger whose level is TEFL_LOG_LEVEL's. It writes to stderr, as te-fl's own messages do."""

from __future__ import annotations

import logging
from typing import Any, Optional, Set

from te_fl import _native

__all__ = ["Logger", "LoggerManager", "debug_print_once", "get_logger", "print_once"]

_LEVELS = {"TRACE": "NOTSET", "OFF": "CRITICAL"}  # te-fl's names that Python's logging does not have


class Logger:
    """logging.Logger's messages, and each of them once by NAME_once()."""

    def __init__(self, name: str, level: Any = logging.INFO) -> None:
        self.logger = logging.getLogger(name)
        self.logger.setLevel(level)
        self.logger.propagate = False
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s %(name)s %(filename)s:%(lineno)d %(levelname)s] %(message)s"))
        self.logger.handlers = [handler]
        self._printed_once: Set[str] = set()

    def __getattr__(self, name: str) -> Any:
        kind, once, _ = name.partition("_once")
        if kind not in ("debug", "info", "warning", "error", "critical"):
            raise AttributeError(name)
        write = getattr(self.logger, kind)
        if not once:
            return write

        def write_once(message: str) -> None:
            if message not in self._printed_once:
                self._printed_once.add(message)
                write(message, stacklevel=2)
        return write_once


class LoggerManager:
    """Has the logger of the process."""

    _instance: Optional["LoggerManager"] = None

    def __init__(self) -> None:
        self.reset()

    @classmethod
    def get_instance(cls) -> "LoggerManager":
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    def get_logger(self) -> Logger:
        if self._logger is None:
            level = str(_native.setting("TEFL_LOG_LEVEL") or "INFO").upper()
            self._logger = Logger("TE-FL", _LEVELS.get(level, level))
        return self._logger

    def print_once(self, message: str) -> None:
        if message not in self._printed:
            self._printed.add(message)
            print(message)

    def debug_print_once(self, func_name: str, backend_name: str = "Backend", *arguments: Any, **options: Any) -> None:
        types = ", ".join(type(value).__name__ for value in arguments)
        self.print_once(f"[{backend_name}] {func_name}({', '.join(filter(None, (types, *options)))})")

    def reset(self) -> None:
        self._logger: Optional[Logger] = None
        self._printed: Set[str] = set()


def get_logger() -> Logger:
    return LoggerManager.get_instance().get_logger()


def print_once(message: str) -> None:
    LoggerManager.get_instance().print_once(message)


def debug_print_once(func_name: str, backend_name: str = "Backend", *arguments: Any, **options: Any) -> None:
    LoggerManager.get_instance().debug_print_once(func_name, backend_name, *arguments, **options)
