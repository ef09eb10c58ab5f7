"""Hosts of the bench: joined by links of a limited rate, and gone afterwards; without them a line says so."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import publishing_hosts
from bench.hosts import NoHostsError, enter, joined

MBIT = 1e6 / 8


def there_are(stem: str) -> bool:
    return bool(list(Path("/run/netns").glob(f"{stem}*")))


def test_a_link_is_as_fast_as_is_said() -> None:
    """A bare socket needs as long as the rate asks for, and the namespaces are gone afterwards."""
    size, rate = 1 << 20, 40.0
    try:
        with joined(2, rate) as network:
            first, second = network.all
            received: list[int] = []
            listener: list[socket.socket] = []

            def receive() -> None:
                enter(second.namespace)
                listener.append(socket.create_server((second.address, 0)))
                ready.set()
                with listener[0], listener[0].accept()[0] as peer:
                    while data := peer.recv(1 << 16):
                        received.append(len(data))

            def send() -> None:
                enter(first.namespace)
                with socket.create_connection(listener[0].getsockname()) as peer:
                    peer.sendall(bytes(size))

            ready = threading.Event()
            receiver = threading.Thread(target=receive)
            receiver.start()
            assert ready.wait(10)
            begun = time.monotonic()
            sender = threading.Thread(target=send)
            sender.start()
            sender.join(30)
            receiver.join(30)
            # A burst of 256 kB at each end of the way is not held back.
            assert sum(received) == size
            assert time.monotonic() - begun > 0.9 * (size - (1 << 19)) / (rate * MBIT)
            stem = first.namespace.rpartition("-")[0]
            assert there_are(stem)
    except NoHostsError as error:
        pytest.skip(f"no network namespaces: {error}")
    assert not there_are(stem)


def test_without_hosts_a_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And there are no rows."""

    def refused(*_: object) -> Any:
        raise NoHostsError("there is no ip command")

    monkeypatch.setattr(publishing_hosts, "joined", refused)
    assert publishing_hosts.publish(SimpleNamespace(null=False)) == []  # type: ignore[arg-type]  # all it needs
    assert "there is no ip command" in capsys.readouterr().err
