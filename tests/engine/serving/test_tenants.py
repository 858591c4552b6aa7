"""Key files: whose key it is, changes on disk, and files that are wrong."""

import json
import os

import pytest

from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.tenants import KeyFile, Tenant, hash_of, new_key


def _write(path, tenants):
    path.write_text(json.dumps({"tenants": tenants}))
    # A clock of the file system may be too coarse to tell two writes apart.
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + len(path.read_bytes())))


def test_keys_are_read_with_their_limits_and_again_when_the_file_changes(tmp_path):
    path = tmp_path / "keys.json"
    acme = {"keys": [hash_of("a"), hash_of("b")], "priority": -2, "max_concurrent": 3}
    _write(path, {"acme": acme, "other": {"keys": [hash_of("c")]}})
    keys = KeyFile(path)
    assert keys.tenant_of("a") == keys.tenant_of("b")
    assert keys.tenant_of("a") == Tenant(name="acme", priority=-2, max_concurrent=3)
    assert keys.tenant_of("c") == Tenant(name="other")
    _write(path, {"acme": acme | {"keys": [hash_of("b")]}})
    assert keys.tenant_of("b").name == "acme"
    for gone in ("a", "c"):
        with pytest.raises(ServiceError):
            keys.tenant_of(gone)


def test_a_file_that_has_become_wrong_locks_nobody_out(tmp_path, caplog):
    path = tmp_path / "keys.json"
    _write(path, {"acme": {"keys": [hash_of("a")]}})
    keys = KeyFile(path)
    path.write_text("{")
    assert keys.tenant_of("a").name == keys.tenant_of("a").name == "acme"
    path.unlink()
    assert keys.tenant_of("a").name == "acme"
    assert len(caplog.records) == 2  # one for each state, not for each call
    assert hash_of("a") not in caplog.text


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "key file"),
        ("[]", "tenants"),
        ('{"tenants": {}}', "holds no key"),
        ('{"tenants": {}, "more": 1}', "tenants"),
        ('{"tenants": {"a": []}}', "must be a mapping"),
        ('{"tenants": {"a": {"keys": []}}}', "holds no key"),
        ('{"tenants": {"a": {"keys": ["a key"]}}}', "sha256:"),
        ('{"tenants": {"a": {"keys": [1]}}}', "sha256:"),
        ('{"tenants": {"a b": {"keys": ["HASH"]}}}', "name"),
        ('{"tenants": {"a": {"keys": ["HASH"], "limit": 1}}}', "limit"),
        ('{"tenants": {"a": {"keys": ["HASH"], "max_concurrent": 0}}}', "above 0"),
        ('{"tenants": {"a": {"keys": ["HASH"], "max_concurrent": 1.5}}}', "whole"),
        ('{"tenants": {"a": {"keys": ["HASH"], "tokens_per_minute": NaN}}}', "above"),
        ('{"tenants": {"a": {"keys": ["HASH"], "priority": true}}}', "priority"),
        ('{"tenants": {"a": {"keys": ["HASH"]}, "b": {"keys": ["HASH"]}}}', "twice"),
        ("[" * 100_000, "key file"),
    ],
)
def test_files_that_are_wrong_are_refused(text, message, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(text.replace("HASH", hash_of("k")))
    with pytest.raises(ValueError, match=message):
        KeyFile(path)


def test_new_keys_are_long_and_differ():
    assert new_key() != new_key() and len(new_key()) >= 43


def test_all_hashes_are_compared_in_constant_time(tmp_path, monkeypatch):
    path = tmp_path / "keys.json"
    _write(path, {"t": {"keys": [hash_of(str(i)) for i in range(5)]}})
    keys, compared = KeyFile(path), []
    monkeypatch.setattr(
        "hmac.compare_digest", lambda a, b: compared.append(b) or a == b
    )
    keys.tenant_of("0")
    assert len(compared) == 5
