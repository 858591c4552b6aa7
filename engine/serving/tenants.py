"""Who calls: bearer keys from a file, each of a tenant with limits of its own.

The file holds hashes, never keys. A key is 32 random bytes (`new_key`), so one round of
SHA-256 is enough: there is nothing to guess.
"""

import dataclasses
import hashlib
import hmac
import json
import logging
import math
import os
import pathlib
import re
import secrets
from collections.abc import Mapping
from typing import Any

from headrace.engine import usage
from headrace.engine.serving.errors import ServiceError

logger = logging.getLogger(__name__)

_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_KEY_CHARS = 512
_MAX_FILE_BYTES = 4_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tenant:
    """A caller's identity and limits; None lifts a limit.

    Attributes:
      name: letters, digits, "_", "." and "-", at most 64.
      priority: of its requests, lower first, under the policy "priority".
      requests_per_minute: in the long run; a minute's worth may come at once.
      tokens_per_minute: of prompts and outputs together, likewise.
      max_concurrent: requests at a time.

    Raises:
      ValueError: a value out of its range.
    """

    name: str
    priority: int = 0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"a tenant's name must be 1 to 64 of letters, digits, '_', '.', '-', "
                f"got {self.name!r:.80}"
            )
        if type(self.priority) is not int or abs(self.priority) > 10**6:
            raise ValueError(
                f"priority must be a whole number within 1,000,000, got "
                f"{self.priority!r:.80}"
            )
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
            value = getattr(self, name)
            if value is None:
                continue
            is_number = type(value) in (int, float) and math.isfinite(value)
            if not is_number or value <= 0:
                raise ValueError(f"{name} must be above 0, got {value!r:.80}")
        if self.max_concurrent is not None and type(self.max_concurrent) is not int:
            raise ValueError(f"max_concurrent must be whole, got {self.max_concurrent}")


ANONYMOUS = Tenant(name=usage.ANONYMOUS)


def new_key() -> str:
    """A key that nobody can guess: 32 random bytes as text."""
    return f"hr-{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """As it stands in the file."""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'replace')).hexdigest()}"


class KeyFile:
    """Keys and tenants of a JSON file, read again when it changes.

        {"tenants": {"acme": {"keys": ["sha256:..."], "requests_per_minute": 600}}}

    A file that has become unreadable or wrong keeps what was read before, with one line
    in the log: a slip of an editor locks nobody out.

    Args:
      path: of the file.

    Raises:
      ValueError: the file cannot be read, or does not hold what it should.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)
        self._stamp: tuple[int, int, int] | None = self._stamp_now()
        self._tenants = _read(self._path)

    def tenant_of(self, key: str | None) -> Tenant:
        """Whose key it is; all hashes are compared, each in constant time.

        Raises:
          ServiceError: unauthenticated: no key, or nobody's.
        """
        self._refresh()
        if not key or len(key) > _MAX_KEY_CHARS:
            raise ServiceError("unauthenticated", "a bearer key is needed")
        presented, found = hash_of(key).encode(), None
        for wanted, tenant in self._tenants.items():
            if hmac.compare_digest(presented, wanted.encode()):
                found = tenant
        if found is None:
            raise ServiceError("unauthenticated", "the bearer key is not known")
        return found

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _refresh(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tenants = _read(self._path)
        except ValueError as error:
            logger.error("keeping the keys that were read before: %s", error)
        else:
            logger.info("read %d keys anew", len(self._tenants))


def _read(path: pathlib.Path) -> dict[str, Tenant]:
    """Hash -> tenant."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"{path}: over {_MAX_FILE_BYTES:,} bytes")
        content = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"key file {path}: {error}") from None
    tenants = content.get("tenants") if isinstance(content, Mapping) else None
    if not isinstance(tenants, Mapping) or set(content) != {"tenants"}:
        raise ValueError(f'key file {path}: must be {{"tenants": {{name: ...}}}}')
    found: dict[str, Tenant] = {}
    for name, entry in tenants.items():
        tenant, hashes = _tenant(path, name, entry)
        for value in hashes:
            if value in found:
                raise ValueError(f"key file {path}: {name}: a key stands there twice")
            found[value] = tenant
    if not found:
        raise ValueError(f"key file {path}: holds no key")
    return found


def _tenant(path: pathlib.Path, name: str, entry: Any) -> tuple[Tenant, list[str]]:
    if not isinstance(entry, Mapping):
        raise ValueError(f"key file {path}: {name!r:.80} must be a mapping")
    known = {field.name for field in dataclasses.fields(Tenant)} - {"name"} | {"keys"}
    if unknown := set(entry) - known:
        raise ValueError(
            f"key file {path}: {name!r:.80} has unknown fields {sorted(unknown)}, "
            f"known are {sorted(known)}"
        )
    hashes = entry.get("keys")
    if not isinstance(hashes, list) or not all(
        isinstance(x, str) and _HASH.fullmatch(x) for x in hashes
    ):
        raise ValueError(
            f"key file {path}: {name!r:.80}: keys must be a list of 'sha256:' and 64 "
            "hex digits"
        )
    options = {key: value for key, value in entry.items() if key != "keys"}
    try:
        return Tenant(name=name, **options), list(hashes)
    except ValueError as error:
        raise ValueError(f"key file {path}: {name!r:.80}: {error}") from None
