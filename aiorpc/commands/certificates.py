"""Make an authority and certificates of workers, for a test bed: DIR/ca.pem, and DIR/NAME.pem with DIR/NAME.key."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import RpcUsageError
from ..protocol.identity import NAME_LIMIT, check_name
from ..transport.certificates import ROLE

_PAST = datetime.timedelta(hours=1)  # clocks differ


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to put them; made if it is not there")
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="+",
        help="a worker (* stands for any characters), its role (role:ROLE), or both (WORKER,role:ROLE)",
    )
    parser.add_argument("--days", type=int, default=30, help="how long they are good for (30)")


def run(options: argparse.Namespace) -> int:
    """Make the certificates, and print their paths. Returns 1 on a failure."""
    try:
        made = make(options.directory, options.names, days=options.days)
    except (RpcUsageError, OSError) as error:
        print(f"python -m aiorpc certificates: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(path)
    return 0


def make(
    directory: Path, names: Sequence[str], *, days: float = 30, start: datetime.datetime | None = None
) -> list[Path]:
    """A certificate with its key for each name, and the authority if it is not there yet: the certificates' paths.

    start: the beginning of their validity; an hour ago if None. Replaces existing certificates. RpcUsageError, with
    nothing written, for a name that is no valid file name or DNS name, for two names of the same file, and for invalid
    days or more than the existing authority has left. OSError if files cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    begin = start or datetime.datetime.now(datetime.UTC) - _PAST
    end = _after(begin, days)
    stems = _stems(names)
    said = {name: _said(name) for name in names}
    authority, key = _authority(directory, begin, end)
    made = [directory / "ca.pem"]
    for stem, name in stems.items():
        own = _new_key()
        certificate = _signed(name, own, authority.subject, key, begin, end, said=said[name])
        _write(directory / f"{stem}.key", _private(own), 0o600)
        _write(directory / f"{stem}.pem", _public(certificate), 0o644)
        made.append(directory / f"{stem}.pem")
    return made


def _after(begin: datetime.datetime, days: float) -> datetime.datetime:
    """The end of validity after some days. RpcUsageError if there is no such date."""
    if not days > 0:
        raise RpcUsageError(f"certificates have to be good for some days, and not for {days}")
    try:
        return begin + datetime.timedelta(days=days) + _PAST
    except OverflowError:
        raise RpcUsageError(f"there is no date that is {days} days from now") from None


def _stems(names: Sequence[str]) -> dict[str, str]:
    """The names, by those of their files without the suffix. RpcUsageError if that cannot be."""
    found: dict[str, str] = {}
    for name in names:
        parts = name.split(",")
        stem = parts[0].replace("*", "_").replace(":", "_")
        if not all(parts) or stem != os.path.basename(stem) or stem in ("ca", ".", ".."):
            raise RpcUsageError(f"{name!r} is no name that a file can have")
        if stem in found:
            raise RpcUsageError(
                f"{found[stem]!r} and {name!r} would both be {stem}.pem: make one of them in another directory, with a "
                "copy of ca.pem and ca.key"
            )
        found[stem] = name
    return found


def _said(name: str) -> list[x509.GeneralName]:
    """What a certificate says of a worker. RpcUsageError if none can say that."""
    said: list[x509.GeneralName] = []
    for part in name.split(","):
        try:
            if part.startswith("role:"):
                role = part.removeprefix("role:")
                said.append(x509.UniformResourceIdentifier(ROLE + check_name(role)))  # of the letters that names have
            else:
                check_name(part.replace("*", "_"))
                said.append(x509.DNSName(part))
        except RpcUsageError:
            raise RpcUsageError(
                f"{name!r} is no name of a worker: use ASCII letters and digits, -, _ and :, fewer than {NAME_LIMIT}"
            ) from None
    return said


def _authority(
    directory: Path, begin: datetime.datetime, end: datetime.datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The authority in that directory; a new one if there is none. RpcUsageError if it ends before `end`."""
    certificate_path, key_path = directory / "ca.pem", directory / "ca.key"
    if certificate_path.exists():
        try:
            held = load_pem_private_key(key_path.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        except (ValueError, TypeError) as error:
            raise RpcUsageError(f"{certificate_path} and {key_path} are no authority: {error}") from None
        if not isinstance(held, ec.EllipticCurvePrivateKey):
            raise RpcUsageError(f"{key_path} is no key of this command")
        if certificate.public_key() != held.public_key():
            raise RpcUsageError(f"{certificate_path} and {key_path} are no authority: each is of another one")
        last = certificate.not_valid_after_utc
        if last < end:  # behind that its certificates are good for nothing
            left = (last - datetime.datetime.now(datetime.UTC)).days
            less = f"give --days {left} at most, or " if left > 0 else ""
            raise RpcUsageError(
                f"the authority {certificate_path} is good until {last:%Y-%m-%d %H:%M} UTC, and certificates until "
                f"{end:%Y-%m-%d %H:%M} were asked for: {less}make a new authority with all certificates in another "
                "directory"
            )
        return certificate, held
    key = _new_key()
    # Twice as long: further certificates can be made for a while, with as many days.
    last = _after(end, (end - begin) / datetime.timedelta(days=1))
    certificate = _signed("aiorpc test authority", key, None, key, begin, last)
    _write(key_path, _private(key), 0o600)
    _write(certificate_path, _public(certificate), 0o644)
    return certificate, key


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name | None,
    signer: ec.EllipticCurvePrivateKey,
    begin: datetime.datetime,
    end: datetime.datetime,
    *,
    said: Sequence[x509.GeneralName] = (),
) -> x509.Certificate:
    """A certificate; that of an authority if it says nothing of a worker."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    authority = not said
    usage = {
        each: False
        for each in ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
    }
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not authority,
                key_cert_sign=authority,
                encipher_only=False,
                decipher_only=False,
                **usage,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if said:
        both = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = builder.add_extension(x509.SubjectAlternativeName(said), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _public(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file as a whole or not at all: workers may read it at any time."""
    unready = path.with_name(path.name + ".new")
    unready.unlink(missing_ok=True)
    descriptor = os.open(unready, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
    unready.replace(path)
