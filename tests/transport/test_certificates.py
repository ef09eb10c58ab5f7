"""The files of TLS: what cannot be used is refused before a worker joins; what has changed is used from then on."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aiorpc.errors import RpcUsageError
from aiorpc.options import Tls
from aiorpc.transport.certificates import Certificate, Credentials
from tests.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "one")


def names(*patterns: str) -> Certificate:
    return Certificate(patterns, ("learner",), b"")


@pytest.mark.parametrize(
    ("patterns", "name", "permitted"),
    [
        (["w1"], "w1", True),
        (["w1"], "w10", False),
        (["w1"], "W1", False),
        (["w0", "w1"], "w1", True),
        (["w*"], "w1", True),
        (["*"], "anything:at-all_1", True),
        (["a*z"], "a-z", True),
        (["a*z"], "a-zz-b", False),
        (["a*a"], "a", False),
        (["a*b*b"], "a-b", False),
        (["a*b*b"], "a-b-b", True),
        (["**w**"], "w", True),
        (["*a" * 40], "a" * 120 + "b", False),  # a regular expression would not be done with it in anybody's life
        (["*" * 100 + "b"], "a" * 120, False),
        (["w."], "w1", False),
        (["[w]"], "w", False),
        ([], "w1", False),
    ],
)
def test_names_are_compared_as_a_whole(patterns: list[str], name: str, permitted: bool) -> None:
    """A star stands for any characters, nothing else does; no name permits nobody."""
    assert names(*patterns).permits(name) is permitted


def test_a_certificate_for_one_worker_is_told_from_others() -> None:
    """What is said over a connection with such a one was said by that worker, and not by another one of its pattern."""
    assert names("w1").is_of("w1") and names("w1", "w1").is_of("w1")
    assert not names("w1").is_of("w2")
    for other in (names("w*"), names("w1", "w2"), names("*"), names()):
        assert not other.is_of("w1")
    assert not names("*").is_of("*")


def test_roles_are_compared_too() -> None:
    """A role has to be in the certificate; one that names roles alone is for any worker of them."""
    assert names("w1").permits("w1", "learner")
    assert not names("w1").permits("w1", "actor")
    assert not names("w1").permits("w2", "learner")
    assert not Certificate(("w1",), (), b"").permits("w1", "learner")
    assert names().permits("anybody", "learner")
    assert not names().permits("anybody", "actor")
    assert not names().permits("anybody")
    assert not Certificate((), ("",), b"").permits("w1", "actor")
    assert "'w1', role 'learner'" in names("w1").describe()
    assert "no worker" in Certificate((), (), b"").describe()


def test_good_files_are_taken(authority: Authority) -> None:
    """Of the name, of a pattern, and of another name where names do not matter."""
    Credentials(authority.tls("w1"), "w1")
    Credentials(authority.tls("w1", of="w*"), "w1")
    Credentials(dataclasses.replace(authority.tls("w2"), verify_names=False), "w1")


def other_key(tls: Tls, authority: Authority) -> Tls:
    return dataclasses.replace(tls, key=authority.tls("w2").key)


def readable(tls: Tls, authority: Authority) -> Tls:
    os.chmod(tls.key, 0o644)
    return tls


def missing(tls: Tls, authority: Authority) -> Tls:
    return dataclasses.replace(tls, cert=authority.folder / "nowhere.pem")


def no_key(tls: Tls, authority: Authority) -> Tls:
    return dataclasses.replace(tls, key="/nowhere.key")


def other_authority(tls: Tls, authority: Authority) -> Tls:
    return dataclasses.replace(tls, ca=Authority(authority.folder.parent / "two").folder / "ca.pem")


def rubbish(tls: Tls, authority: Authority) -> Tls:
    Path(tls.ca).write_text("no certificate")
    return tls


def no_certificate(tls: Tls, authority: Authority) -> Tls:
    Path(tls.cert).write_text("no certificate")
    return tls


def a_folder(tls: Tls, authority: Authority) -> Tls:
    return dataclasses.replace(tls, ca=authority.folder)


def a_pipe(tls: Tls, authority: Authority) -> Tls:
    pipe = authority.folder / "pipe.key"
    os.mkfifo(pipe, 0o600)
    return dataclasses.replace(tls, key=pipe)


def expired(tls: Tls, authority: Authority) -> Tls:
    return authority.tls("w1", days=1, ago=3)


def early(tls: Tls, authority: Authority) -> Tls:
    return authority.tls("w1", ago=-3)


def other_name(tls: Tls, authority: Authority) -> Tls:
    return authority.tls("w1", of="w2")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (missing, "the file of the certificate cannot be read: .*No such file.*nowhere.pem"),
        (no_key, "the file of the key cannot be read: .*nowhere.key"),
        (a_folder, "the file of the authority cannot be read"),
        (a_pipe, "the file of the key is no file: .*pipe.key"),
        (rubbish, "ca.pem holds no certificate of an authority"),
        (no_certificate, "w1.pem and .*w1.key are no certificate and its key"),
        (other_key, "the key .*w2.key does not fit the certificate .*w1.pem"),
        (readable, r"others than this user can read or write the key .*w1.key \(mode 0644, owner"),
        (other_authority, "none that the authority .*two/ca.pem vouches for now"),
        (expired, "certificate has expired"),
        (early, "certificate is not yet valid"),
        (other_name, "the certificate .*w2.pem is for 'w2', and not for it"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    authority: Authority, spoil: Callable[[Tls, Authority], Tls], text: str
) -> None:
    """The error names the worker, the file and what is wrong with it."""
    tls = spoil(authority.tls("w1"), authority)
    with pytest.raises(RpcUsageError, match=f"worker 'w1' cannot use TLS: .*{text}"):
        Credentials(tls, "w1")


def test_an_encrypted_key_is_refused(authority: Authority) -> None:
    """Nobody is asked for a password, least of all at a terminal."""
    from cryptography.hazmat.primitives import serialization

    tls = authority.tls("w1")
    key = serialization.load_pem_private_key(Path(tls.key).read_bytes(), None)
    Path(tls.key).write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    with pytest.raises(RpcUsageError, match=r"the key .*w1.key is encrypted"):
        Credentials(tls, "w1")


def test_new_files_are_used_by_new_connections(authority: Authority) -> None:
    """As soon as they are there; the contexts of connections that are open stay as they were."""
    credentials = Credentials(authority.tls("w1"), "w1")
    before, hash_before = credentials.context(opener=True)
    assert credentials.context(opener=True) == (before, hash_before)
    authority.make("w1")
    after, hash_after = credentials.context(opener=True)
    assert after is not before and hash_after != hash_before
    assert credentials.context(opener=False)[1] == hash_after


def test_half_of_the_new_files_is_not_used(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """While a new key stands beside the old certificate the old ones go on, with one line in the log."""
    tls = authority.tls("w1")
    credentials = Credentials(tls, "w1")
    before = credentials.context(opener=True)[1]
    key, certificate = Path(tls.key), Path(tls.cert)
    held = certificate.read_bytes()
    authority.make("w1")
    new = certificate.read_bytes()
    certificate.write_bytes(held)
    with caplog.at_level(logging.WARNING, "aiorpc"):
        for _ in range(3):
            assert credentials.context(opener=True)[1] == before
    assert [entry.getMessage() for entry in caplog.records if "new TLS files are not used yet" in entry.getMessage()]
    assert len(caplog.records) == 1 and str(key) in caplog.text
    certificate.write_bytes(new)
    assert credentials.context(opener=True)[1] != before
