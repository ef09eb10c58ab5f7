"""What Kubernetes does to a process, imitated on this machine: pods in namespaces, with names that a name server knows.

A pod has a network, a process, a mount and a UTS namespace: its command is process 1, its host name is the pod's, and
resolv.conf, hosts and nsswitch.conf are those that the kubelet writes, or that images have. Names stand for the
addresses that the test says, from when it says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.hosts import Host, enter, joined
from tests.network.hosts import needed
from tests.processes.workers import wait_for

ROOT = Path(__file__).resolve().parents[2]
DOMAIN = "default.svc.cluster.local"
LIMIT = 100.0  # seconds; each process of a pod imports torch anew
SECRET = {"AIORPC_SECRET": "one for all pods of a test"}
#: Mounts the files of the folder $0 over those in /etc, takes the name of the pod, and becomes the command.
SETUP = 'for file in "$0"/*; do mount --bind "$file" /etc/"${file##*/}"; done; hostname "$POD" && exec "$@"'
_A, _KNOWN, _UNKNOWN = 1, 0x8580, 0x8583
_HEADER = struct.Struct("!6H")


class Names:
    """The cluster's name server, on a host of its own. addresses: of full names; may be changed at any time. asked: how
    often for the address of which name."""

    def __init__(self, host: Host) -> None:
        self.addresses: dict[str, str] = {}
        self.asked: Counter[str] = Counter()
        self._end = (host.address, 53)
        self._made = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, args=(host.namespace,), name="names")
        self._thread.start()
        assert self._made.wait(LIMIT) and self._socket is not None

    def _serve(self, namespace: str) -> None:
        enter(namespace)  # this thread alone
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as self._socket:
            self._socket.bind(self._end)
            self._made.set()
            while True:
                question, sender = self._socket.recvfrom(512)
                if not question:
                    return
                self._socket.sendto(self._answer(question), sender)

    def _answer(self, question: bytes) -> bytes:
        labels, at = [], _HEADER.size
        while size := question[at]:
            labels.append(question[at + 1 : at + 1 + size].decode())
            at += 1 + size
        (kind,) = struct.unpack_from("!H", question, at + 1)
        name, asked = ".".join(labels).lower(), question[_HEADER.size : at + 5]
        address = self.addresses.get(name)
        self.asked[name] += kind == _A
        found = kind == _A and address is not None
        number = struct.unpack_from("!H", question)[0]
        head = _HEADER.pack(number, _KNOWN if address else _UNKNOWN, 1, found, 0, 0)
        record = b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, 1, 4) + socket.inet_aton(address or "0.0.0.0")
        return head + asked + (record if found else b"")

    def close(self) -> None:
        """Ask no more."""
        assert self._socket is not None
        self._socket.sendto(b"", self._end)
        self._thread.join()


@dataclass
class Pod:
    """A pod that was started. first: the process id of its process 1 in this system."""

    name: str
    address: str
    process: subprocess.Popen[bytes]
    first: int
    log: Path

    def said(self) -> str:
        """What it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, seconds: float = LIMIT) -> None:
        """Until it has written that; AssertionError with what it wrote if it ends before, or does not."""

        def written() -> bool:
            ended = self.process.poll() is not None
            if text in self.said():
                return True
            assert not ended, f"{self.name} has ended with {self.process.returncode}:\n{self.said()}"
            return False

        try:
            wait_for(written, seconds)
        except AssertionError as error:
            raise AssertionError(f"{self.name} did not write {text!r}: {error}\n{self.said()}") from None

    def send(self, number: signal.Signals) -> None:
        """A signal for process 1, from outside, as the kubelet sends it."""
        os.kill(self.first, number)

    def kill(self) -> None:
        """The grace period is over, or the node had no memory left."""
        self.send(signal.SIGKILL)
        self.end()

    def end(self, seconds: float = LIMIT) -> int:
        """Wait for its end: the exit status of its process 1, 128 more than the number of a signal."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {seconds:g} s:\n{self.said()}") from None
        return status if status >= 0 else 128 - status

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as the kubelet does for a probe, and `kubectl exec` does."""
        within = ["nsenter", "--target", str(self.first), "--mount", "--uts", "--net", "--pid", "--wd=."]
        return subprocess.run(
            [*within, *command], env=dict(env), capture_output=True, text=True, timeout=LIMIT, cwd=ROOT
        )


@dataclass
class Cluster:
    """Nodes, each for one pod, and the name server. folder: for the files of pods."""

    names: Names
    server: str
    nodes: list[Host]
    folder: Path
    pods: list[Pod] = field(default_factory=list)

    def variables(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        """The environment of a container. more: what its manifest and its controller add."""
        folder = self.folder / f"tmp{len(self.pods)}"
        folder.mkdir(exist_ok=True)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **more}

    def start(
        self, name: str, service: str, command: Sequence[str], env: Mapping[str, str], *, known: bool = True
    ) -> Pod:
        """Start a pod on the next node. known: its name is at once that of its address."""
        node = self.nodes[len(self.pods)]
        if known:
            self.publish(name, service, node.address)
        etc = self.folder / f"etc{len(self.pods)}"
        etc.mkdir()
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{node.address} {name}.{service}.{DOMAIN} {name}\n")
        search = f"search {DOMAIN} svc.cluster.local cluster.local\noptions ndots:5"
        (etc / "resolv.conf").write_text(f"nameserver {self.server}\n{search}\n")
        (etc / "nsswitch.conf").write_text("passwd: files\nhosts: files dns\n")
        log = self.folder / f"log{len(self.pods)}"
        given = {**self.variables(env), "POD": name}
        new = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        whole = ["ip", "netns", "exec", node.namespace, *new, "sh", "-c", SETUP, str(etc), *command]
        with log.open("wb") as out:
            process = subprocess.Popen(whole, env=given, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            first = int(wait_for(lambda: children.exists() and children.read_text().split(), LIMIT)[0])
        except BaseException:
            process.kill()
            process.wait()
            raise
        self.pods.append(Pod(name, node.address, process, first, log))
        return self.pods[-1]

    def publish(self, name: str, service: str, address: str | None) -> None:
        """Let the name of a pod stand for that address; None: for none."""
        self.names.addresses.pop(full(name, service), None)
        if address is not None:
            self.names.addresses[full(name, service)] = address

    def asked(self, name: str, service: str) -> int:
        """How often the server was asked for that pod's address."""
        return self.names.asked[full(name, service)]


def full(name: str, service: str) -> str:
    """The name by which all of the cluster finds a pod."""
    return f"{name}.{service}.{DOMAIN}"


@contextlib.contextmanager
def cluster(folder: Path, nodes: int) -> Iterator[Cluster]:
    """So many nodes, whose pods are killed at the end of the block; skips, with the reason, where there can be none."""
    with contextlib.ExitStack() as stack:
        with needed("hosts"):
            hosts = stack.enter_context(joined(nodes + 1, rate=400))
        server, *others = hosts.all
        names = Names(server)
        stack.callback(names.close)
        made = Cluster(names, server.address, others, folder)
        try:
            yield made
        finally:
            for pod in made.pods:
                if pod.process.poll() is None:
                    pod.process.kill()  # and with it all of the pod
                pod.process.wait()
