"""transformer_engine.plugin.core.types."""

from te_fl.registration import BackendImplKind, OpImpl as _Impl
from te_fl.tex_form import TexImpl as OpImpl

__all__ = ["BackendImplKind", "OpImpl", "TOKEN_PATTERNS", "match_token"]

TOKEN_PATTERNS = {
    "flagos": lambda impl: impl.kind is BackendImplKind.DEFAULT,
    "reference": lambda impl: impl.kind is BackendImplKind.REFERENCE,
    "vendor": lambda impl: impl.kind is BackendImplKind.VENDOR,
}


def match_token(impl: _Impl, token: str) -> bool:
    """True if a token of a policy's list names the implementation."""
    head, colon, name = token.partition(":")
    if not colon:
        return token in TOKEN_PATTERNS and TOKEN_PATTERNS[token](impl)
    if head == "vendor":
        return impl.kind is BackendImplKind.VENDOR and (impl.vendor or "").lower() == name.lower()
    return head == "impl" and impl.impl_id == name
