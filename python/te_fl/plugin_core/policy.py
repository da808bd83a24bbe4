"""transformer_engine.plugin.core.policy: TransformerEngine-FL's policies as te-fl's."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Collection, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple

from te_fl import _native, tex_form
from te_fl.errors import InvalidArgument
from te_fl.policy import policy

__all__ = ["PREFER_DEFAULT", "PREFER_REFERENCE", "PREFER_VENDOR", "PolicyManager", "SelectionPolicy", "VALID_PREFER_VALUES", "bump_policy_epoch",
           "get_policy", "get_policy_epoch", "policy_context", "policy_from_env", "reset_global_policy", "set_global_policy", "with_allowed_vendors",
           "with_denied_vendors", "with_preference", "with_strict_mode"]

PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE = "flagos", "vendor", "reference"
VALID_PREFER_VALUES = frozenset({PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE})


@dataclasses.dataclass(frozen=True)
class SelectionPolicy:
    """A complete policy: omitted settings are unset, whatever was in force before, except `deterministic` and max_staged_bytes.

    prefer: flagos, vendor or reference, the kind that is tried first. strict: if the first candidate cannot run, the call is an error. per_op_order:
    (op, tokens) pairs; each is an exclusive list of kinds, vendor:NAME and impl:ID. allow_vendors: None allows all. A misspelt kind raises
    te_fl.errors.InvalidArgument, a ValueError, on construction; a misspelt token or op raises it when the policy is put in force.
    """

    prefer: str = "flagos"
    strict: bool = False
    per_op_order: Tuple[Tuple[str, Tuple[str, ...]], ...] = ()
    deny_vendors: FrozenSet[str] = frozenset()
    allow_vendors: Optional[FrozenSet[str]] = None
    # The policy that get_policy() was asked for prefers no kind. Then priorities alone decide, which `prefer` cannot say.
    _by_priority: bool = dataclasses.field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.prefer not in VALID_PREFER_VALUES:
            raise InvalidArgument(f"Invalid prefer value: {self.prefer!r}; it is one of {', '.join(sorted(VALID_PREFER_VALUES))}")

    @classmethod
    def from_dict(cls, prefer: str = "flagos", strict: bool = False, per_op_order: Optional[Mapping[str, Sequence[str]]] = None,
                  deny_vendors: Optional[Collection[str]] = None, allow_vendors: Optional[Collection[str]] = None) -> "SelectionPolicy":
        """Creates a policy from lists and sets; per_op_order maps ops to tokens."""
        orders = tuple(sorted((op, tuple(tokens)) for op, tokens in (per_op_order or {}).items()))
        return cls(prefer.lower(), strict, orders, frozenset(deny_vendors or ()), frozenset(allow_vendors) if allow_vendors else None)

    @property
    def per_op_order_dict(self) -> Dict[str, List[str]]:
        return {op: list(tokens) for op, tokens in self.per_op_order}

    def get_per_op_order(self, op_name: str) -> Optional[List[str]]:
        return self.per_op_order_dict.get(op_name)

    def get_default_order(self) -> List[str]:
        """The kinds in the order in which they are tried for an op without a list."""
        return sorted(("flagos", "vendor", "reference"), key=lambda kind: kind != self.prefer)

    def is_vendor_allowed(self, vendor_name: str) -> bool:
        return vendor_name not in self.deny_vendors and (self.allow_vendors is None or vendor_name in self.allow_vendors)

    def fingerprint(self) -> str:
        """A text that is equal for equal policies."""
        return ";".join(f"{name}={value}" for name, value in self._settings().items() if value not in (None, False))

    def _settings(self) -> dict:
        if self.allow_vendors is not None and not self.allow_vendors:
            raise InvalidArgument("SelectionPolicy: allow_vendors is empty, which would allow no vendor; prefer or list another kind, or leave it None")
        return {"whole": True, "prefer": None if self._by_priority else self.prefer, "strict": self.strict,
                "allow_vendors": None if self.allow_vendors is None else ",".join(sorted(self.allow_vendors)),
                "deny_vendors": ",".join(sorted(self.deny_vendors)) or None,
                "per_op": ";".join(f"{op}={'|'.join(tokens)}" for op, tokens in self.per_op_order) or None}


def get_policy() -> SelectionPolicy:
    """The policy in force on this thread. A policy without a preferred kind is reported as "flagos"; set again, it prefers none."""
    now = _native.policy_settings()
    orders = {op: ["flagos" if token == "default" else token for token in tokens] for op, tokens in now["per_op"].items()}
    found = SelectionPolicy.from_dict("flagos" if now["prefer"] in (None, "default") else now["prefer"], now["strict"], orders, now["deny_vendors"],
                                      now["allow_vendors"])
    return dataclasses.replace(found, _by_priority=now["prefer"] is None)


def policy_from_env() -> SelectionPolicy:
    """The policy of the environment variables, as they are now."""
    value = {name: os.environ.get(f"TE_FL_{name}", "").strip() for name in ("PREFER", "PREFER_VENDOR", "STRICT", "DENY_VENDORS", "ALLOW_VENDORS", "PER_OP")}
    prefer = value["PREFER"].lower() or ("vendor" if value["PREFER_VENDOR"] == "1" else "flagos")
    lists = [entry.partition("=") for entry in value["PER_OP"].split(";") if entry.strip()]
    vendors = {name: {vendor.strip() for vendor in value[name].split(",") if vendor.strip()} for name in ("DENY_VENDORS", "ALLOW_VENDORS")}
    return SelectionPolicy.from_dict("flagos" if prefer == "default" else prefer, value["STRICT"].lower() in ("1", "true", "yes", "on"),
                                     {op.strip(): [token.strip() for token in tokens.split("|")] for op, _, tokens in lists},
                                     vendors["DENY_VENDORS"], vendors["ALLOW_VENDORS"])


_epoch = 0
_lock = threading.Lock()  # for _epoch


def _forget_lock() -> None:
    """Replaces the lock in a forked child: another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def get_policy_epoch() -> int:
    """The number of changes of the policy by these functions."""
    return _epoch


def bump_policy_epoch() -> int:
    """Lets implementations run again that failed; returns the new epoch."""
    global _epoch
    with _lock:
        _epoch += 1
        now = _epoch
    tex_form.forget_failures()
    return now


def set_global_policy(selection: SelectionPolicy) -> SelectionPolicy:
    """Sets the policy of all threads from their next calls on, outside of scopes; returns the previous policy."""
    before = get_policy()
    _native.set_global_policy(selection._settings())
    bump_policy_epoch()
    return before


def reset_global_policy() -> None:
    """Restores the policy of the environment variables, which are read again."""
    _native.set_global_policy(None)
    bump_policy_epoch()
    _native.reload()


class policy_context(policy):
    """A scope of this thread: with policy_context(SelectionPolicy(strict=True)): ..."""

    def __init__(self, selection: SelectionPolicy) -> None:
        settings = selection._settings()
        _native.check_policy(settings)
        self._arguments, self._entered = (settings,), []


def with_strict_mode() -> policy:
    return policy(strict=True)


def with_preference(prefer: str) -> policy:
    return policy(prefer=prefer)


def with_allowed_vendors(*vendors: str) -> policy:
    return policy(allow_vendors=vendors)


def with_denied_vendors(*vendors: str) -> policy:
    """A scope that also denies these vendors."""
    return policy(deny_vendors=[*_native.policy_settings()["deny_vendors"], *vendors])


class PolicyManager:
    """These functions as methods of one object."""

    _instance: Optional["PolicyManager"] = None

    @classmethod
    def get_instance(cls) -> "PolicyManager":
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    get_policy = staticmethod(get_policy)
    get_policy_epoch = staticmethod(get_policy_epoch)
    bump_policy_epoch = staticmethod(bump_policy_epoch)
    set_global_policy = staticmethod(set_global_policy)
    reset_global_policy = staticmethod(reset_global_policy)
    create_policy_context = staticmethod(policy_context)
