"""Who is asking: API keys, their names and roles, compared in constant time.

Without keys every caller is an admin, since the server then binds loopback only. Knows no route.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reef.config import Key
from reef.errors import Forbidden, Unauthorized

SECRET_HEADERS = frozenset({"authorization", "x-api-key", "cookie", "proxy-authorization"})


@dataclass(frozen=True, slots=True)
class Caller:
    name: str | None
    """the credential's name, None without keys"""
    admin: bool
    scenario: str | None = None
    """the only scenario the key may use"""


def identify(headers: Mapping[str, str], keys: Sequence[Key]) -> Caller:
    """The caller of a request with these (lower-case) headers. Raises Unauthorized."""
    if not keys:
        return Caller(None, admin=True)
    offered = headers.get("x-api-key") or _bearer(headers.get("authorization", ""))
    if not offered:
        raise Unauthorized("no API key: send it as bearer token or x-api-key")
    raw = offered.encode("latin-1", "replace")  # header text is bytes read as latin-1
    found = None
    for key in keys:  # every key is compared, so that timing tells nothing about which one is close
        if hmac.compare_digest(key.key.encode(), raw):
            found = key
    if found is None:
        raise Unauthorized("this API key is not known")
    return Caller(found.name, admin=found.role == "admin", scenario=found.scenario)


def _bearer(header: str) -> str:
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def require_admin(caller: Caller) -> None:
    """Raises Forbidden unless the caller may change what is served and read what others said."""
    if not caller.admin:
        raise Forbidden("this needs a key with the admin role")


def without_secrets(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers as they may be stored."""
    return {name: value for name, value in headers.items() if name not in SECRET_HEADERS}
