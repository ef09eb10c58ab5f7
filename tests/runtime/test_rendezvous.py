"""How workers find each other: real stores, threads as ranks, and child processes where a process has to die."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch.distributed import HashStore, Store, TCPStore

from aiorpc.devices import DeviceClaims, to_device_map, to_devices
from aiorpc.errors import DeviceMapError, RendezvousError, RpcUsageError, SerializationError
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.runtime.engine.host import host_identity
from aiorpc.runtime.meeting import stores
from aiorpc.runtime.meeting.meeting_place import MeetingPlace
from aiorpc.runtime.meeting.membership import Member
from aiorpc.runtime.meeting.patience import Patience
from aiorpc.runtime.meeting.rendezvous import MeetingOptions, Rendezvous
from aiorpc.runtime.meeting.secret import USER_KEY, Secret, fingerprint, make_key
from tests.limits import busy
from tests.ports import free_port
from tests.processes.workers import has_stopped, process_state
from tests.processes.zygote import Zygote, zygote

pytestmark = pytest.mark.usefixtures("server_made_once")
T = TypeVar("T")
PATIENCE = 20.0
SOON = 0.3
ELSEWHERE = "another-boot:1:1"
LONG = "long enough, and random"


def make_record(name: str, rank: int, *, host: str = "", pid: int = 0) -> WorkerRecord:
    """A record as a worker of this process would make it, or of another host or process."""
    host, pid = host or host_identity(), pid or os.getpid()
    return WorkerRecord(name, rank, secrets.token_hex(16), host, "node", pid, "main", "", "127.0.0.1", 0)


def together(*actions: Callable[[], T]) -> list[T | Exception]:
    """Run all actions at once, each in a thread; what each returned or raised, in order."""
    results: list[T | Exception | None] = [None] * len(actions)

    def run(index: int) -> None:
        try:
            results[index] = actions[index]()
        except Exception as error:
            # A traceback would keep the frames, and with them the stores, alive.
            results[index] = error.with_traceback(None)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    return [result for result in results if result is not None]


def native_threads() -> list[str]:
    """Names of all threads of this process, those of libraries too."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
        except OSError:
            continue
    return sorted(names)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition for a bounded time."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


class Group:
    """Rendezvous of one test, all at one meeting place, closed at the end with the hosts last."""

    def __init__(self, method: str, store: Store | None) -> None:
        self.method = method
        self.store = store
        self.opened: list[Rendezvous] = []
        self.require_secret: bool | None = False

    def open(self, rank: int | None, size: int | None, timeout: float = PATIENCE) -> Rendezvous:
        opened = Rendezvous.open(
            self.method,
            rank=rank,
            world_size=size,
            timeout=timeout,
            store=self.store,
            options=MeetingOptions(require_secret=self.require_secret),
        )
        self.opened.append(opened)
        return opened

    def join(
        self,
        rank: int | None,
        size: int | None,
        name: str = "",
        timeout: float = PATIENCE,
        host: str = "",
        pid: int = 0,
        claims: DeviceClaims | None = None,
    ) -> list[WorkerRecord]:
        opened = self.open(rank, size, timeout)
        return opened.join(lambda number: make_record(name or f"worker{number}", number, host=host, pid=pid), claims)

    def join_all(self, size: int, timeout: float = PATIENCE) -> list[list[WorkerRecord] | Exception]:
        return together(*(lambda rank=rank: self.join(rank, size, timeout=timeout) for rank in range(size)))

    def leave_all(self) -> None:
        """Everybody leaves and closes, the host of the store last."""
        for opened in self.opened:
            for record in opened.members():
                if record.id == opened.rank:
                    opened.leave(record)
        self.close()

    def close(self) -> None:
        for opened in sorted(self.opened, key=lambda one: one.hosts_store):
            opened.close()
        self.opened.clear()


@pytest.fixture(scope="module")
def prepared(_own_temporary_directory: None) -> Iterator[Zygote]:
    """An interpreter to fork programs from."""
    with zygote() as made:
        yield made


@pytest.fixture(autouse=True)
def no_secret_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's environment holds does not decide these tests."""
    monkeypatch.delenv("AIORPC_SECRET", raising=False)


@pytest.fixture(params=["given", "file", "tcp"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    """A meeting place of each kind in turn."""
    methods = {"given": "env://", "file": f"file://{tmp_path}/meet", "tcp": f"tcp://127.0.0.1:{free_port()}"}
    made = Group(methods[request.param], HashStore() if request.param == "given" else None)
    yield made
    made.close()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Group]:
    """The quickest meeting place: a store of this process."""
    made = Group("env://", HashStore())
    yield made
    made.close()


def texts(results: Sequence[object]) -> list[str]:
    """The messages of results that are all RendezvousErrors."""
    assert [type(result) for result in results] == [RendezvousError] * len(results), results
    return [str(result) for result in results]


# ---- a world of fixed size


def test_all_ranks_learn_the_same_members(group: Group) -> None:
    """Each rank gets every record, ordered by rank, and finds workers by name."""
    results = group.join_all(4)
    first = results[0]
    assert isinstance(first, list)
    assert [record.name for record in first] == ["worker0", "worker1", "worker2", "worker3"]
    assert all(result == first for result in results)
    for opened in group.opened:
        assert opened.members() == first
        assert opened.find("worker2", PATIENCE) == first[2]
        assert opened.find("nobody", PATIENCE) is None
        assert (opened.generation, opened.dynamic, opened.world_size) == (1, False, 4)


def test_a_name_used_twice_is_an_error_on_every_rank(group: Group) -> None:
    """The error names the name and both ranks."""
    names = ["same", "other", "same"]
    results = together(*(lambda r=r, n=n: group.join(r, 3, n) for r, n in enumerate(names)))
    for text in texts(results):
        assert "name 'same' is not unique: ranks 0 and 2" in text


def test_different_world_sizes_are_an_error_on_every_rank(group: Group) -> None:
    """The error names ranks and both sizes."""
    started = time.monotonic()
    results = together(lambda: group.join(0, 3), lambda: group.join(1, 4))
    for text in texts(results):
        assert "world_size differs" in text
        assert "(rank 0," in text and "(rank 1," in text
        assert "says 3" in text and "says 4" in text
    assert time.monotonic() - started < PATIENCE / 2


def test_a_rank_beyond_the_world_is_an_error_on_every_rank(group: Group) -> None:
    """The error names the rank and the size."""
    results = together(lambda: group.join(0, 2), lambda: group.join(2, 2))
    for text in texts(results):
        assert "rank 2 of worker2" in text and "not below the world_size of 2" in text


@pytest.mark.parametrize("twice", [0, 1])
def test_a_rank_taken_twice_is_an_error_on_every_rank(group: Group, twice: int) -> None:
    """All that are there learn who the two holders are, long before the time is up."""
    started = time.monotonic()
    results = together(
        lambda: group.join(0, 3, "a"), lambda: group.join(1, 3, "b"), lambda: group.join(twice, 3, "second")
    )
    for text in texts(results):
        assert f"rank {twice} was taken twice" in text
        assert "second (rank" in text and f"pid {os.getpid()} on node" in text
    assert time.monotonic() - started < PATIENCE / 2


def test_a_second_holder_does_not_disturb_a_complete_group(group: Group) -> None:
    """It is refused; it does not silently become a second generation, and the others see nothing of it."""
    group.join_all(2)
    group_before = [opened.members() for opened in group.opened]
    with pytest.raises(RendezvousError, match=r"rank 1 was taken twice: by worker1 .* and by late"):
        group.join(1, 2, "late", timeout=5)
    assert [opened.members() for opened in group.opened[:2]] == group_before
    assert group.opened[0].find("late", PATIENCE) is None


@pytest.mark.parametrize("first", ["torch", "aiorpc"])
def test_a_store_that_torch_uses_as_well_is_not_closing_once_a_worker_has_left(first: str) -> None:
    """Whether torch or the worker served it first: who comes next, under whatever rank, need not wait for its end."""
    port = free_port()

    def torchs() -> TCPStore:
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)

    def opened() -> Rendezvous:
        return Rendezvous.open(f"tcp://127.0.0.1:{port}", rank=0, world_size=1, timeout=PATIENCE)

    store = torchs() if first == "torch" else None
    worker = opened()
    store = store or torchs()
    assert worker.hosts_store
    worker.leave(worker.join(lambda number: make_record("a", number))[0])
    worker.close()
    place = MeetingPlace(0, 1, host="127.0.0.1", port=port)
    with closing(stores.reach_tcp(place, Patience(PATIENCE), 0.0)) as kv:
        kv.check_open()
    again = opened()
    again.leave(again.join(lambda number: make_record("a", number))[0])
    again.close()
    del store


def test_missing_ranks_are_named_when_the_time_is_up(group: Group) -> None:
    """Every waiting rank is told within its timeout who is missing and who is here."""
    started = time.monotonic()
    patience = 4 * SOON  # by then both are there
    results = together(*(lambda rank=rank: group.join(rank, 4, timeout=patience) for rank in (0, 2)))
    for text in texts(results):
        assert f"waited {patience:g} s for ranks 1, 3 of 4" in text
        assert "here: worker0 (rank 0," in text and "worker2 (rank 2," in text
    assert patience <= time.monotonic() - started < patience + 3 * busy()


def test_the_group_can_be_formed_after_one_gave_up(group: Group) -> None:
    """A rank that waited in vain tries again, and the one that comes late joins it there."""
    with pytest.raises(RendezvousError, match="for rank 1 of 2"):
        group.join(0, 2, timeout=SOON)
    group.close()
    assert all(isinstance(result, list) for result in group.join_all(2))


def test_the_group_can_be_formed_again_and_again(group: Group) -> None:
    """init, shutdown, init at the same place works, whether the store lives on or not."""
    generations = []
    for _ in range(3):
        results = group.join_all(3)
        assert all(isinstance(result, list) for result in results), results
        generations.append({opened.generation for opened in group.opened})
        group.leave_all()
    assert generations == ([{1}] * 3 if group.method.startswith("tcp") else [{1}, {2}, {3}])


def test_ranks_that_come_back_before_the_host_has_gone_wait_for_it(prepared: Zygote, tmp_path: Path) -> None:
    """A client that reaches the old store as it closes goes on to the new one, and torch logs nothing."""
    script = CHILD + (
        "def round_of(rank):\n"
        "    for _ in range(3):\n"
        "        r = Rendezvous.open(sys.argv[1], rank=rank, world_size=4, timeout=20)\n"
        "        records = r.join(lambda n: record(f'w{n}', n))\n"
        "        assert len(records) == 4\n"
        "        if rank == 0:\n"
        "            time.sleep(0.1)\n"
        "        r.leave(records[rank]); r.close()\n"
        "threads = [threading.Thread(target=round_of, args=(rank,)) for rank in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print('finished')\n"
    )
    with prepared.run(script, [f"tcp://localhost:{free_port()}"], tmp_path) as child:
        child.finish(50)
        assert (child.out, child.err) == ("finished\n", "")


def test_a_timeout_of_zero_waits_until_it_is_stopped(group: Group) -> None:
    """No limit means none, but the stop event ends the wait at once."""
    stop = threading.Event()
    opened = Rendezvous.open(group.method, rank=0, world_size=2, timeout=0, stop=stop, store=group.store)
    group.opened.append(opened)
    failures: list[Exception] = []

    def wait() -> None:
        try:
            opened.join(lambda number: make_record("a", number))
        except RendezvousError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    stop.set()
    thread.join(10)
    assert [str(error) for error in failures] == ["joining the group was stopped"]


# ---- stores that are not there


def test_a_store_that_cannot_be_reached_is_named_within_the_timeout() -> None:
    """Nobody listens: the error says where and for how long it was tried."""
    port = free_port()
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=rf"cannot reach the store at tcp://127.0.0.1:{port} within 0.5 s"):
        Rendezvous.open(f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=0.5)
    assert 0.4 < time.monotonic() - started < 3 * busy()


def test_a_server_that_never_speaks_is_not_waited_for() -> None:
    """Something accepts connections and says nothing: an error within the timeout all the same."""
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        port = mute.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(RendezvousError, match=rf"cannot reach the store at tcp://127.0.0.1:{port}.*no answer"):
            Rendezvous.open(f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=0.5)
        assert time.monotonic() - started < 4 * busy()


def test_a_file_in_a_folder_that_does_not_exist_is_refused_at_once(tmp_path: Path) -> None:
    """torch alone would try for minutes."""
    with pytest.raises(RendezvousError, match="cannot open the rendezvous file"):
        Rendezvous.open(f"file://{tmp_path}/none/meet", rank=0, world_size=1, timeout=5)


@pytest.mark.parametrize("kind", ["cut off", "no store", "no pairs"])
def test_a_file_that_is_no_whole_store_is_refused_soon(kind: str, prepared: Zygote, tmp_path: Path) -> None:
    """Of another program's, or of a disk that was full: torch reads it for ever, with the interpreter lock."""
    path = tmp_path / "meet"
    length = (8).to_bytes(4, sys.byteorder)
    content = {
        "cut off": length + b"12345678" + length + b"123",
        "no store": b"a: 1\n",
        "no pairs": length + b"12345678",
    }
    path.write_bytes(content[kind])
    lines = f"""
try:
    Rendezvous.open("file://{path}", rank=0, world_size=1, timeout=5)
except RendezvousError as error:
    print(error)
"""
    with prepared.run("from aiorpc.errors import RendezvousError\n" + CHILD + lines, [], tmp_path) as child:
        child.finish(10 * busy())
        assert f"cannot open the rendezvous file {path}: it holds something else than a store, or its last" in child.out
    assert path.read_bytes() == content[kind]


@contextmanager
def hosted_elsewhere(prepared: Zygote, folder: Path, rank: int | None, size: int | None) -> Iterator[tuple[Group, int]]:
    """A group, and the process id of who hosts its store, which ends with the block."""
    url = f"tcp://127.0.0.1:{free_port()}"
    lines = f"r = Rendezvous.open({url!r}, rank={rank}, world_size={size}, timeout=20)\nprint('up', flush=True)"
    with prepared.run(CHILD + lines + STAY, [], folder) as host:
        host.wait_for_line("up")
        yield Group(url, None), host.pid


def test_a_store_that_goes_away_is_an_error_for_those_who_wait(prepared: Zygote, tmp_path: Path) -> None:
    """The host dies before the group is complete: the others say that they cannot reach it."""
    with hosted_elsewhere(prepared, tmp_path, 0, 3) as (group, _):
        opened = group.open(1, 3, timeout=10 * SOON)
    with pytest.raises(RendezvousError, match=r"the store at .* no longer answers|cannot reach the store at"):
        opened.join(lambda number: make_record("b", number))
    group.close()


def test_looking_for_a_worker_is_bounded(prepared: Zygote, tmp_path: Path) -> None:
    """The process that hosts the store is stopped; whoever looks may be on a loop."""
    with hosted_elsewhere(prepared, tmp_path, None, None) as (group, host):
        group.join(None, None, "a")
        opened = group.opened[0]
        found = opened.find("a", PATIENCE)
        assert found is not None and opened.find("b", PATIENCE) is None
        os.kill(host, signal.SIGSTOP)
        try:
            while not has_stopped(host):  # the test's own limit bounds this
                time.sleep(0.001)
            with pytest.raises(RendezvousError, match=r"cannot find worker 'a': the store at .* has not answered"):
                opened.find("a", 0.1)
        finally:
            os.kill(host, signal.SIGCONT)
    group.close()


# ---- what environment and URL say


def test_env_reads_the_four_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; arguments win over the first two."""
    set_environment(monkeypatch, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    group = Group("env://", None)
    opened = group.open(None, None)
    assert (opened.rank, opened.world_size, opened.hosts_store) == (0, 1, True)
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    client = group.open(1, 2)
    assert (client.rank, client.world_size, client.hosts_store) == (1, 2, False)
    group.close()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The error says which one env:// needs."""
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}
    set_environment(monkeypatch, **{name: value for name, value in given.items() if name != missing})
    with pytest.raises(RendezvousError, match=f"environment variable {missing}"):
        Rendezvous.open("env://", rank=None, world_size=None, timeout=1)


def test_env_may_name_another_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AIORPC_INIT_METHOD has the URL; the other variables, which a launcher sets as well, say nothing then."""
    set_environment(monkeypatch, RANK="1", WORLD_SIZE="2", AIORPC_INIT_METHOD=f"file://{tmp_path}/meet")
    with closing(Rendezvous.open("env://", rank=None, world_size=None, timeout=5)) as opened:
        assert opened.world_size is None and (tmp_path / "meet").exists()
    set_environment(monkeypatch, AIORPC_INIT_METHOD="env://")
    with pytest.raises(RpcUsageError, match="AIORPC_INIT_METHOD"):
        Rendezvous.open("env://", rank=None, world_size=None, timeout=1)


def test_under_torchrun_the_agent_owns_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker hosts it, and groups can be formed in it one after another."""
    agent = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
    set_environment(
        monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(agent.port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    group = Group("env://", None)
    for generation in (1, 2):
        assert all(isinstance(result, list) for result in group.join_all(3))
        assert {(opened.hosts_store, opened.generation) for opened in group.opened} == {(False, generation)}
        group.leave_all()
    del agent
    gc.collect()


def test_rank_and_world_size_may_stand_in_the_url() -> None:
    """As torch's tcp:// URLs have them; arguments win."""
    url = f"tcp://localhost:{free_port()}?rank=0&world_size=1"
    with closing(Rendezvous.open(url, rank=None, world_size=None, timeout=5)) as opened:
        assert (opened.rank, opened.world_size) == (0, 1)
    with closing(Rendezvous.open(url, rank=0, world_size=3, timeout=5)) as opened:
        assert opened.world_size == 3


@pytest.mark.parametrize(
    ("method", "rank", "size", "text"),
    [
        ("tcp://127.0.0.1", 0, 1, "names no port"),
        ("tcp://[::1]", 0, 1, "names no port"),
        ("tcp://:4000", 0, 1, "names no host"),
        ("tcp://a..b:4000", 0, 1, r"names no host: 'a\.\.b' can be no name of one"),
        (f"tcp://{'a' * 64}.b:4000", 0, 1, "names no host: 'aaa.*' can be no name of one"),
        ("tcp://[fe80::1%eth0]:4000", 0, 1, "init_method names 'fe80::1%eth0', an address within one link"),
        ("tcp://[fe80::1]:4000", None, None, "init_method names 'fe80::1', an address within one link"),
        ("tcp://a:x", 0, 1, "port in init_method must be an integer"),
        ("tcp://a:70000", 0, 1, "between 1 and 65535"),
        ("tcp://a:4000?rank=x", None, 1, "rank in init_method must be an integer"),
        ("http://a:4000", 0, 1, "must start with env://, tcp:// or file://"),
        ("file://", 0, 1, "names no path"),
        ("tcp://[::1:4000", 0, 1, r"init_method is no URL .*'tcp://\[::1:4000'"),
        ("tcp://a:4000", None, 2, "rank is needed"),
        ("tcp://a:4000", -1, 2, "must not be negative"),
        ("tcp://a:4000", 0, 0, "world_size must be at least 1"),
        ("tcp://a:4000", "0", 1, "rank must be an integer, not '0'"),
        ("tcp://a:4000", 0.5, 1, r"rank must be an integer, not 0\.5"),
        ("tcp://a:4000", True, 2, "rank must be an integer, not True"),
        ("tcp://a:4000", 0, "1", "world_size must be an integer, not '1'"),
    ],
)
def test_a_url_that_makes_no_sense_is_a_usage_error(method: str, rank: Any, size: Any, text: str) -> None:
    """Said at once, without trying anything; so are numbers that are none."""
    with pytest.raises(RpcUsageError, match=text):
        Rendezvous.open(method, rank=rank, world_size=size, timeout=5)


# ---- the server of the store


def test_the_server_is_gone_after_close() -> None:
    """No thread of the store stays behind, and the port can be hosted again at once."""
    port = free_port()
    for _ in range(2):
        group = Group(f"tcp://127.0.0.1:{port}", None)
        group.join_all(2)
        assert "pt_tcpstore_uv" in native_threads()
        group.leave_all()
        wait_until(lambda: "pt_tcpstore_uv" not in native_threads(), "the server's thread is gone")
    Rendezvous.open(f"tcp://127.0.0.1:{port}", rank=0, world_size=1, timeout=5).close()


def test_a_process_group_of_torch_may_share_the_port() -> None:
    """Its store in the same process is the same server, which stays while either uses it."""
    port = free_port()
    group = Group(f"tcp://127.0.0.1:{port}", None)
    group.join_all(2)
    shared = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=10), False, True)
    group.leave_all()
    shared.set("gloo", "1")
    assert shared.check(["gloo"])
    assert all(isinstance(result, list) for result in group.join_all(2))
    assert {opened.generation for opened in group.opened} == {2}
    group.leave_all()


def test_a_group_that_lives_on_loopback_is_not_served_to_the_network() -> None:
    """torch would listen on every interface."""
    port = free_port()
    with closing(Rendezvous.open(f"tcp://127.0.0.1:{port}", rank=0, world_size=1, timeout=5)):
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), 2):
            pass
        socket.create_connection(("127.0.0.1", port), 2).close()


# ---- workers that died


def test_a_rank_that_died_here_can_be_taken_again(prepared: Zygote, tmp_path: Path) -> None:
    """Killed without leaving: the next group forms at the same file, as the dead holder is seen to be dead."""
    method = f"file://{tmp_path}/meet"
    lines = f"r = Rendezvous.open({method!r}, rank=1, world_size=2, timeout=20)\n"
    lines += "r.join(lambda n: record('victim', n))\nprint('joined', flush=True)"
    with prepared.run(CHILD + lines + STAY, [], tmp_path) as child:
        group = Group(method, None)
        assert [record.name for record in group.join(0, 2)] == ["worker0", "victim"]
        child.wait_for_line("joined")
        with pytest.raises(RendezvousError, match=rf"taken twice: by victim \(rank 1, pid {child.pid} on"):
            group.join(1, 2, "heir", timeout=5)
        group.leave_all()
        os.kill(child.pid, signal.SIGKILL)
        # Nobody has waited for the child: it is a zombie, which must not pass for alive.
        wait_until(lambda: process_state(child.pid) == "Z", "the child is a zombie")
        results = together(lambda: group.join(0, 2), lambda: group.join(1, 2, "heir"))
        assert all(isinstance(result, list) for result in results), results
        group.leave_all()


def test_one_that_died_while_joining_does_not_end_the_wait_of_others(here: Group) -> None:
    """Rank 1 died before the group was complete and is started again: rank 0 meets it in the next generation."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(10)
    with pytest.raises(RendezvousError, match="joining the group was stopped"):
        stop_while_joining(here, pid=dead.pid)
    results = together(lambda: here.join(0, 3), lambda: here.join(1, 3), lambda: here.join(2, 3))
    assert all(isinstance(result, list) for result in results), results
    assert {opened.generation for opened in here.opened[1:]} == {2}


@pytest.mark.parametrize("others_first", [True, False])
def test_one_that_gave_up_while_joining_is_no_member(here: Group, others_first: bool) -> None:
    """Its process lives on and starts the rank anew, before or after the others have come: all meet the new one."""
    with pytest.raises(RendezvousError, match="joining the group was stopped"):
        stop_while_joining(here)
    store = here.store
    assert store is not None
    here.opened[0].abandon()

    def others_join(rank: int) -> list[WorkerRecord]:
        if not others_first:
            wait_until(lambda: store.check(["aiorpc/2/slot/1"]), "rank 1 is there again")
        return here.join(rank, 3)

    def join_again() -> list[WorkerRecord]:
        if others_first:
            others = ["aiorpc/2/slot/0", "aiorpc/2/slot/2"]
            wait_until(lambda: store.check(others), "the others do not take it for a member")
        return here.join(1, 3, "again")

    for members in together(lambda: others_join(0), join_again, lambda: others_join(2)):
        assert isinstance(members, list), members
        assert [record.name for record in members] == ["worker0", "again", "worker2"]


def test_a_stale_holder_on_another_host_is_named(here: Group) -> None:
    """Nothing proves that it is dead: the error says who it was and what can be done."""
    with pytest.raises(RendezvousError):
        stop_while_joining(here, host=ELSEWHERE, pid=4711)
    with pytest.raises(RendezvousError, match=r"taken twice: by stale \(rank 1, pid 4711 on node\).*remove the rend"):
        here.join(1, 3, timeout=5)


def stop_while_joining(group: Group, *, host: str = "", pid: int = 0) -> None:
    """Take rank 1 of 3 as another process would, and end while waiting, without leaving."""
    stop, store = threading.Event(), group.store
    assert store is not None
    opened = Rendezvous.open(group.method, rank=1, world_size=3, timeout=20, stop=stop, store=store)
    group.opened.append(opened)

    def stop_once_there() -> None:
        wait_until(lambda: bool(store.check(["aiorpc/1/slot/1"])), "rank 1 has its place")
        stop.set()

    stopping = threading.Thread(target=stop_once_there)
    stopping.start()
    try:
        opened.join(lambda number: make_record("stale", number, host=host, pid=pid))
    finally:
        stopping.join()


# ---- a group that is joined freely


def test_workers_join_and_leave_freely(group: Group) -> None:
    """Each sees who is there; one that left is gone; its name can be used again under a new id."""
    assert [record.name for record in group.join(None, None, "a")] == ["a"]
    assert [record.name for record in group.join(None, None, "b")] == ["a", "b"]
    first, second = group.opened
    assert (first.dynamic, first.hosts_store) == (True, group.method.startswith("tcp"))
    old = first.find("b", PATIENCE)
    assert old is not None and old.id == 1
    second.leave(old)
    second.leave(old)
    assert first.find("b", PATIENCE) is None
    assert [record.name for record in group.join(None, None, "b")] == ["a", "b"]
    new = first.find("b", PATIENCE)
    assert new is not None and (new.id, new.incarnation != old.incarnation) == (2, True)


def test_many_that_join_at_once_get_ids_of_their_own(group: Group) -> None:
    """Also over TCP, where the first of them becomes the host."""
    results = together(*(lambda i=i: group.join(None, None, f"n{i}") for i in range(12)))
    assert all(isinstance(result, list) for result in results), results
    members = group.opened[0].members()
    assert {record.id for record in members} == set(range(12))
    assert {record.name for record in members} == {f"n{i}" for i in range(12)}
    assert sum(opened.hosts_store for opened in group.opened) <= 12


def test_a_name_in_use_is_refused_to_the_newcomer(group: Group) -> None:
    """The error names who has it; the one who has it is not disturbed."""
    group.join(None, None, "a")
    with pytest.raises(RendezvousError, match=r"name 'a' is not unique: a \(rank 0, pid \d+ on node\) has it"):
        group.join(None, None, "a")
    assert [record.name for record in group.opened[0].members()] == ["a"]


def test_a_newcomer_that_gives_up_is_off_the_list(group: Group) -> None:
    """It may have been entered by then: nobody takes it for a member, and its name is free."""
    assert [record.name for record in group.join(None, None, "a")] == ["a"]
    group.join(None, None, "b")
    group.opened[-1].abandon()
    assert [record.name for record in group.opened[0].members()] == ["a"]
    assert [record.name for record in group.join(None, None, "b")] == ["a", "b"]


def test_a_rank_may_be_chosen_if_it_is_free(here: Group) -> None:
    """Numbers given out later avoid it; a second claim to it is refused."""
    here.join(1, None, "chosen")
    with pytest.raises(RendezvousError, match=r"rank 1 is taken by chosen"):
        here.join(1, None, "other")
    here.join(None, None, "b")
    assert [record.id for record in here.join(None, None, "c")] == [1, 0, 2]


def test_a_name_whose_holder_died_here_is_free(prepared: Zygote, tmp_path: Path) -> None:
    """Killed without leaving: the next to join takes it off the list and may have its name and its rank."""
    method = f"file://{tmp_path}/meet"
    lines = f"r = Rendezvous.open({method!r}, rank=3, world_size=None, timeout=20)\n"
    lines += "r.join(lambda n: record('a', n))\nprint('joined', flush=True)"
    group = Group(method, None)
    with prepared.run(CHILD + lines + STAY, [], tmp_path) as child:
        child.wait_for_line("joined")
        with pytest.raises(RendezvousError, match=rf"'a' is not unique: a \(rank 3, pid {child.pid} on"):
            group.join(3, None, "a")
    assert [record.id for record in group.join(3, None, "a")] == [3]
    group.close()


def test_a_lost_peer_can_be_taken_off_the_list_by_others(here: Group) -> None:
    """Of another host, where nothing else proves that it is dead."""
    here.join(None, None, "far", host=ELSEWHERE, pid=4711)
    here.join(None, None, "near")
    lost = here.opened[1].find("far", PATIENCE)
    assert lost is not None
    here.opened[1].leave(lost)
    assert [record.name for record in here.join(None, None, "far")] == ["near", "far"]


def one_struck_off(here: Group) -> Sequence[Rendezvous]:
    """Two members, of which the second has taken the first off the list."""
    for name in ("a", "b"):
        here.join(None, None, name)
    first, second = here.opened
    first.serve_joining()
    second.leave(first.record)
    return first, second


def test_a_member_that_was_taken_off_the_list_and_lives_comes_back(
    here: Group, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever cannot reach it strikes it off; others may reach it, and newcomers are to find it."""
    first, second = one_struck_off(here)
    assert [record.name for record in second.members()] == ["b"]
    first.serve_joining(PATIENCE)  # it may be about to hear why
    first.serve_joining(parted=True)  # those who are there go on without it
    assert [record.name for record in second.members()] == ["b"]
    first.serve_joining()
    assert second.members() == [second.record, first.record]
    assert "worker a was struck off the list of its group by a member that cannot reach it; it lives" in caplog.text
    assert {record.name for record in here.join(None, None, "c")} == {"a", "b", "c"}
    with pytest.raises(RendezvousError, match=f"rank {first.record.id} "):
        here.join(first.record.id, None, "d")


def test_members_that_have_taken_each_other_off_the_list_do_not_leave_it_empty(here: Group) -> None:
    """The first one that looks comes back although it has lost all others; the rest find it, and stay away."""
    for name in ("a", "b"):
        here.join(None, None, name)
    first, second = here.opened
    for each in here.opened:
        each.serve_joining(parted=True)
    records = first.record, second.record
    first.leave(records[1])
    second.leave(records[0])
    assert first.members() == []
    for each in here.opened:
        each.serve_joining(parted=True)
    assert second.members() == [first.record]
    with pytest.raises(RendezvousError, match=f"rank {records[1].id} belonged to a worker that has left this group"):
        here.join(records[1].id, None, "c")


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "replaced"])
def test_a_member_that_leaves_or_was_replaced_does_not_come_back(
    here: Group, leaves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """To the list, from which others have taken it off; who has its name now is told once."""
    first, second = one_struck_off(here)
    if leaves:
        first.say_farewell(first.record)
    else:
        here.join(None, None, "a")
    before = second.members()
    for _ in range(2):
        first.serve_joining()
    assert second.members() == before and first.record not in before
    assert caplog.text.count("stands there now, and joining members find that") == (0 if leaves else 1)


# ---- devices


def mapped(count: int, to: str, mapping: dict[int, int]) -> DeviceClaims:
    """What a worker with so many devices and one map says of them."""
    return DeviceClaims(count, (), {to: to_device_map(mapping)})


def join_with(group: Group, claims: Sequence[DeviceClaims]) -> list[list[WorkerRecord] | Exception]:
    """Join as a world of fixed size whose ranks say this of their devices."""
    size = len(claims)
    return together(*(lambda rank=rank: group.join(rank, size, claims=claims[rank]) for rank in range(size)))


def test_all_ranks_learn_what_all_say_of_their_devices(group: Group) -> None:
    """By name; who says nothing has none."""
    claims = [mapped(2, "worker1", {0: 1}), DeviceClaims(2, (*to_devices([1]),)), DeviceClaims()]
    results = join_with(group, claims)
    assert all(isinstance(result, list) for result in results), results
    assert [opened.claims for opened in group.opened] == [{f"worker{rank}": claims[rank] for rank in range(3)}] * 3
    group.leave_all()
    group.join(0, 1)
    assert group.opened[0].claims == {"worker0": DeviceClaims()}


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (mapped(1, "nobody", {0: 0}), "Node worker1 has invalid target node names in its device maps"),
        (
            mapped(1, "worker2", {1: 0}),
            "Node worker1 has source devices with invalid indices in its device map for worker2",
        ),
        (
            mapped(1, "worker0", {0: 7}),
            "Node worker1 has target devices with invalid indices in its device map for worker0",
        ),
    ],
)
def test_a_bad_device_map_of_one_is_an_error_on_every_rank(group: Group, bad: DeviceClaims, text: str) -> None:
    """All raise the same ValueError, long before the time is up; the next generation is not disturbed."""
    good = DeviceClaims(2)
    started = time.monotonic()
    results = join_with(group, [good, bad, good])
    assert time.monotonic() - started < PATIENCE / 2
    assert [type(result) for result in results] == [DeviceMapError] * 3
    assert {str(result).split("\n")[0] for result in results} == {text}
    assert len({str(result) for result in results}) == 1 and isinstance(results[0], ValueError)
    assert all(not opened.claims for opened in group.opened)
    group.close()
    assert all(isinstance(result, list) for result in join_with(group, [good, good, good]))


def test_a_newcomer_with_a_bad_device_map_is_refused_alone(group: Group) -> None:
    """Its own map, or that of a member for it: the members are not disturbed, and the name stays free."""
    group.join(None, None, "a", claims=mapped(1, "late", {0: 1}))
    with pytest.raises(
        DeviceMapError, match=r"^Node b has target devices with invalid indices in its device map for a\n"
    ):
        group.join(None, None, "b", claims=mapped(1, "a", {0: 1}))
    with pytest.raises(DeviceMapError, match=r"^Node b has devices with invalid indices\n"):
        group.join(None, None, "b", claims=DeviceClaims(1, (*to_devices([1]),)))
    with pytest.raises(
        DeviceMapError, match=r"^Node a has target devices with invalid indices in its device map for late\n"
    ):
        group.join(None, None, "late", claims=DeviceClaims(1))
    assert [record.name for record in group.opened[0].members()] == ["a"]
    assert [record.name for record in group.join(None, None, "late", claims=DeviceClaims(2))] == ["a", "late"]
    assert group.opened[-1].claims == {"a": mapped(1, "late", {0: 1}), "late": DeviceClaims(2)}


def test_a_member_in_the_store_is_read_strictly() -> None:
    """With claims of its own, and nothing more or less."""
    member = Member(make_record("a", 0), True, mapped(2, "b", {0: 1}))
    whole = member.to_json()
    assert Member.from_json(whole) == member
    asking = replace(member, require_secret=False, certificates=True)
    assert Member.from_json(asking.to_json()) == asking
    for wrong in (
        whole[:3],
        [*whole, None],
        [*whole[:2], None, *whole[3:]],
        [*whole[:2], [0, "cuda", [], []], *whole[3:]],
        None,
    ):
        with pytest.raises(RendezvousError, match="something that is no worker"):
            Member.from_json(wrong)


# ---- the secret


def test_on_one_host_the_secret_is_derived_from_the_key_of_the_user(group: Group, tmp_path: Path) -> None:
    """All get the same 32 bytes, others at the same key; the store has neither, and the file is this user's alone."""
    values = agree(group, 3, tmp_path)
    assert len({*values}) == 1 and len(values[0]) == 32
    (path,) = tmp_path.glob("here/*")
    assert path.name == USER_KEY and stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_bytes() != values[0]
    if isinstance(group.store, HashStore):
        assert not group.store.check(["aiorpc/1/secret/value"])
        assert group.store.get("aiorpc/1/secret").decode() == fingerprint(values[0])
        with closing(Group("env://", HashStore())) as other:
            assert agree(other, 1, tmp_path) != values[:1], "the salt of each store is another one"


@pytest.mark.parametrize("size", [3, None])
def test_on_several_hosts_the_secret_goes_through_the_store_if_all_say_so(
    here: Group, tmp_path: Path, size: int | None
) -> None:
    """Each worker has to say that it needs no secret of the environment."""
    if size is None:
        values = [free(here, tmp_path / "here", "a")]
        assert here.store is not None and not here.store.check(["aiorpc/1/secret/value"])
        values += [served(here, tmp_path / "far", "b", host=ELSEWHERE), free(here, tmp_path / "here", "c")]
    else:
        values = agree(here, size, tmp_path, far={1})
    assert len({*values}) == 1 and len(values[0]) == 32
    assert here.store is not None and values[0].hex() == here.store.get("aiorpc/1/secret/value").decode()


def free(group: Group, folder: Path, name: str, host: str = "") -> bytes:
    """Join a free group, with that private directory; its secret."""
    folder.mkdir(mode=0o700, exist_ok=True)
    records = group.join(None, None, name, host=host)
    return group.opened[-1].agree_secret(records[-1], folder)


def served(group: Group, folder: Path, name: str, host: str = "") -> bytes:
    """The same while the first member looks after those who come."""
    over, first = threading.Event(), group.opened[0]

    def serve() -> None:
        while not over.wait(0.01):
            first.serve_joining()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        return free(group, folder, name, host)
    finally:
        over.set()
        serving.join()


def test_a_far_joining_member_is_not_given_the_secret(here: Group, tmp_path: Path) -> None:
    """A member that requires one does not put it into the store, whatever stands there of others."""
    here.require_secret = None
    free(here, tmp_path / "here", "a")
    here.require_secret = False
    with pytest.raises(RendezvousError, match=r"far .* have require_secret=False, a .* have not"):
        served(here, tmp_path / "far", "far", host=ELSEWHERE)
    here.opened[0].serve_joining()
    assert here.store is not None and not here.store.check(["aiorpc/1/secret/value"])


@pytest.mark.parametrize("spoil", ["mode", "link", "size"])
def test_a_key_that_others_may_have_written_is_refused(here: Group, tmp_path: Path, spoil: str) -> None:
    """Mode, owner, kind and length are checked each time that it is read."""
    free(here, tmp_path, "a")
    path = tmp_path / USER_KEY
    if spoil == "mode":
        path.chmod(0o644)
    elif spoil == "size":
        path.write_bytes(bytes(5))
    else:
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "moved")
    with pytest.raises(RendezvousError, match=r"user's key.*AIORPC_SECRET|not a private file of this user .*remove it"):
        free(here, tmp_path, "b")


@pytest.mark.parametrize("size", [2, None])
def test_members_with_different_keys_are_told_so(here: Group, tmp_path: Path, size: int | None) -> None:
    """As where they have another TMPDIR, or where a stranger has written a secret of his own into the store."""
    here.require_secret = None
    said = "has another secret than .*TMPDIR.* Or a stranger has written into the store"
    assert here.store is not None
    if size is None:
        free(here, tmp_path / "here", "a")
        with pytest.raises(RendezvousError, match=said):
            free(here, tmp_path / "there", "b")
        return
    here.store.set("aiorpc/1/secret", fingerprint(bytes(32)))
    here.store.set("aiorpc/1/secret/value", bytes(32).hex())
    here.join_all(size)
    for one in here.opened:
        with pytest.raises(RendezvousError, match=said):
            one.agree_secret(one.record, tmp_path)


def test_a_key_that_was_tidied_up_is_written_again(here: Group, tmp_path: Path) -> None:
    """By the members that have it, so that those who come later have the same."""
    value = free(here, tmp_path, "a")
    (tmp_path / USER_KEY).unlink()
    here.opened[0].serve_joining()
    assert free(here, tmp_path, "b") == value


@pytest.mark.parametrize("size", [3, None])
def test_on_several_hosts_a_secret_is_required(here: Group, tmp_path: Path, size: int | None) -> None:
    """Every member on either host is told so by its init; the store has nothing that is secret."""
    here.require_secret = None
    records = [here.join(None, None, "w0"), here.join(None, None, "w1", host=ELSEWHERE)][-1] if size is None else []
    if size is not None:
        results = together(*(lambda rank=rank: join_far(here, rank, size) for rank in range(size)))
        records = next(result for result in results if isinstance(result, list))
    assert here.store is not None
    for opened, own in zip(sorted(here.opened, key=lambda one: one.rank or 0), records, strict=True):
        if size is None and own.host != ELSEWHERE:
            continue  # it was there first, when there was nobody elsewhere
        with pytest.raises(RendezvousError, match=r"AIORPC_SECRET is not set, and .* on another host .*openssl rand"):
            opened.agree_secret(own, tmp_path)
    assert not here.store.check(["aiorpc/1/secret"]) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("method", ["tcp://127.0.0.1:{}", "file://{}"])
def test_two_users_of_a_host_need_a_secret(tmp_path: Path, size: int | None, method: str) -> None:
    """Neither may read a file of the other one; each is told so, as their calls would fail."""
    other = f"{os.getuid() + 1}@{host_identity().partition('@')[2]}"
    place = method.format(f"{tmp_path}/meet" if "file" in method else free_port())
    with closing(Group(place, None)) as group:
        group.require_secret = None
        if size is None:
            group.join(None, None, "w0")
            group.join(None, None, "w1", host=other)
        else:
            hosts = ("", other, "")
            together(*(lambda n=n: group.join(n, size, f"w{n}", host=hosts[n]) for n in range(size)))
        (tmp_path / "directory").mkdir()
        for opened in group.opened:
            if size is None and opened is group.opened[0]:
                continue  # it was there first, when there was nobody else
            own = opened.record
            others = "w1" if own.name != "w1" else "w0"
            said = rf"AIORPC_SECRET is not set, and {others} .*another user.* Set AIORPC_SECRET"
            with pytest.raises(RendezvousError, match=said):
                opened.agree_secret(own, tmp_path / "directory")
        assert not list((tmp_path / "directory").iterdir())


def join_far(group: Group, rank: int, size: int) -> list[WorkerRecord]:
    """Join, rank 1 from another host."""
    return group.join(rank, size, f"w{rank}", host=ELSEWHERE if rank == 1 else "")


def test_members_beside_each_other_need_no_secret(here: Group, tmp_path: Path) -> None:
    """On one host, as long as the store is there as well."""
    here.require_secret = None
    assert len({*agree(here, 3, tmp_path)}) == 1
    here.close()
    here.require_secret = True
    with pytest.raises(RendezvousError, match="this worker has require_secret=True: set AIORPC_SECRET"):
        here.open(None, None)


def test_the_secret_of_the_environment_wins(
    here: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One key for all, made of it by a slow hash; nothing is written and nothing is logged, on however many hosts."""
    monkeypatch.setenv("AIORPC_SECRET", LONG)
    here.require_secret = None
    values = agree(here, 2, tmp_path, far={1})
    assert here.store is not None
    assert {*values} == {make_key(Secret(LONG.encode()), bytes.fromhex(here.store.get("aiorpc/salt").decode()))}
    assert len(values[0]) == 32 and values[0] != hashlib.sha256(LONG.encode()).digest()
    assert not list(tmp_path.glob("*/*")) and not caplog.records


@pytest.mark.parametrize(
    ("text", "reason"), [("", "is set, and empty"), ("x", "has 1 bytes"), ("fifteen letters", "has 15 bytes")]
)
def test_a_short_secret_is_an_error(here: Group, monkeypatch: pytest.MonkeyPatch, text: str, reason: str) -> None:
    """Whoever sets it to nothing means something else; the error says what is needed."""
    monkeypatch.setenv("AIORPC_SECRET", text)
    with pytest.raises(RendezvousError, match=rf"^AIORPC_SECRET {reason}.*openssl rand"):
        here.open(0, 1)


def test_another_salt_in_the_store_keeps_workers_from_joining(here: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys do not fit those of the members; what is no salt is told as such."""
    monkeypatch.setenv("AIORPC_SECRET", LONG)
    here.join(None, None, "a")
    assert here.store is not None
    for salt, text in ((bytes(16).hex(), "was not written by a worker with our"), ("rubbish", "holds no salt")):
        here.store.set("aiorpc/salt", salt)
        with pytest.raises(RendezvousError, match=text):
            here.join(None, None, "b")


def test_a_secret_is_not_shown_and_does_not_travel() -> None:
    """Neither its text nor whatever holds it has it in its repr."""
    secret = Secret(LONG.encode())
    for shown in (repr(secret), str(secret), f"{secret!s:>20}", f"{[secret]}"):
        assert LONG not in shown and "a secret" in shown
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(SerializationError, match="is not sent to anybody"):
            pickle.dumps(secret, protocol)
    assert secret == LONG.encode()


def test_a_secret_in_the_environment_of_some_is_an_error_for_all(
    here: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names who has it and who has not, instead of a refused handshake later."""
    opened = [here.open(0, 2)]
    monkeypatch.setenv("AIORPC_SECRET", LONG)
    opened.append(here.open(1, 2))
    joined = together(*(lambda one=one: one.join(lambda n: make_record(f"w{n}", n)) for one in opened))
    for one, records in zip(opened, joined, strict=True):
        assert isinstance(records, list)
        with pytest.raises(RendezvousError, match=r"for all workers or for none: w1 .* have it, w0 .* have not"):
            one.agree_secret(records[one.rank or 0], tmp_path)


def test_a_record_that_somebody_else_wrote_is_seen_by_its_worker(here: Group) -> None:
    """Whose address was changed in the store does not go on with it."""

    def change() -> None:
        assert here.store is not None
        wait_until(lambda: here.store is not None and here.store.check(["aiorpc/1/slot/0"]), "rank 0 is there")
        member = json.loads(here.store.get("aiorpc/1/slot/0"))
        member[0][9] = 4711
        here.store.set("aiorpc/1/slot/0", json.dumps(member))
        here.join(1, 2)

    with pytest.raises(RendezvousError, match="another record of rank 0 than the one that this worker wrote there"):
        raise next(result for result in together(lambda: here.join(0, 2), change) if isinstance(result, Exception))


@pytest.mark.parametrize(
    ("method", "confined"),
    [
        ("tcp://127.0.0.1:{}", True),
        ("tcp://localhost:{}", True),
        ("tcp://[::1]:{}", True),
        ("tcp://0.0.0.0:{}", False),
        ("file://{}", False),
    ],
)
def test_whether_all_members_have_to_be_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, confined: bool
) -> None:
    """At a loopback address, unless AIORPC_SECRET is set: the address may be the near end of a tunnel."""
    with closing(Group(method.format(f"{tmp_path}/meet" if "file" in method else free_port()), None)) as group:
        assert group.open(0, 1).confined == confined
        monkeypatch.setenv("AIORPC_SECRET", LONG)
        assert not group.open(0, 1).confined


@pytest.mark.parametrize("size", [2, None])
def test_records_bear_the_seal_of_the_secret(here: Group, monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    """With AIORPC_SECRET, whoever does not know it cannot write a record that a member believes, nor move one."""
    monkeypatch.setenv("AIORPC_SECRET", LONG)
    first = here.open(0, size)
    assert here.store is not None
    if size is None:
        first.join(lambda number: make_record("a", number))
        roster = json.loads(here.store.get("aiorpc/1/roster"))
        roster["members"][0][0][9] = 4711
        here.store.set("aiorpc/1/roster", json.dumps(roster))
        results: list[object] = [*together(lambda: here.join(None, None, "b"), lambda: first.members())]
    else:
        stranger = Member(make_record("stranger", 1), True, seal="ab" * 32)
        here.store.set("aiorpc/1/slot/1", json.dumps(stranger.to_json()))
        results = [*together(lambda: first.join(lambda number: make_record("a", number)))]
    for text in texts(results):
        assert "was not written by a worker with our AIORPC_SECRET" in text


def test_a_record_of_another_generation_or_place_is_not_believed(here: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seal is good for what was said, and when."""
    member = Member(make_record("a", 1), True).sealed(bytes(32), 3)
    assert member.is_known(bytes(32), 3) and Member.from_json(member.to_json()) == member
    assert not member.is_known(bytes(32), 4) and not member.is_known(bytes(31) + b"x", 3)
    assert not replace(member, record=replace(member.record, tcp_port=7)).is_known(bytes(32), 3)
    assert not replace(member, claims=DeviceClaims(7)).is_known(bytes(32), 3)
    monkeypatch.setenv("AIORPC_SECRET", LONG)
    key = make_key(Secret(LONG.encode()), bytes(16))
    assert here.store is not None
    here.store.set("aiorpc/salt", bytes(16).hex())
    here.store.set("aiorpc/1/slot/1", json.dumps(Member(make_record("b", 0), True).sealed(key, 1).to_json()))
    with pytest.raises(RendezvousError, match=r"has b \(rank 0, .* in the place of rank 1"):
        here.join(0, 2, "a")


def agree(group: Group, size: int, folder: Path, far: frozenset[int] | set[int] = frozenset()) -> list[bytes]:
    """Join as a world of `size`, some ranks from another host, each host with a directory of its own; all secrets."""

    def worker(rank: int) -> bytes:
        own = folder / ("far" if rank in far else "here")
        own.mkdir(mode=0o700, exist_ok=True)
        opened = group.open(rank, size)
        records = opened.join(lambda number: make_record(f"w{number}", number, host=ELSEWHERE if rank in far else ""))
        return opened.agree_secret(records[rank], own)

    values = together(*(lambda rank=rank: worker(rank) for rank in range(size)))
    secrets_found = [value for value in values if isinstance(value, bytes)]
    assert len(secrets_found) == size, values
    return secrets_found


# ---- identities


def test_host_identity_is_the_same_for_all_processes_here() -> None:
    """And it tells this boot and these namespaces from others."""
    child = run_python("-c", f"{LIGHT}from aiorpc.runtime.engine.host import host_identity\nprint(host_identity())")
    assert child == host_identity()
    assert host_identity().count(":") == 2


def test_a_script_and_its_spawned_children_have_one_main(tmp_path: Path) -> None:
    """Both ways to start a child load the script again as __mp_main__; another process of it agrees too."""
    script = tmp_path / "script.py"
    script.write_text(MAIN_SCRIPT)
    first, second = run_python(str(script), "spawn", "forkserver", "fork").split(), run_python(str(script)).split()
    assert (len(first), len(second)) == (4, 1) and {*first} == {*second} == {first[0]}
    assert first[0].startswith("file:")


def test_a_main_without_a_file_is_its_own() -> None:
    """python -c: two processes differ, a forked child is the same."""
    code = LIGHT + (
        "import os\nfrom aiorpc.runtime.engine.host import main_identity\n"
        "print(main_identity(), flush=True)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    print(main_identity(), flush=True); os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    parent, child = run_python("-c", code).split()
    assert parent == child
    assert parent.startswith("process:") and run_python("-c", code).split()[0] != parent


# ---- child processes

CHILD = """
import os, secrets, socket, sys, threading, time
from aiorpc.protocol.identity import WorkerRecord
from aiorpc.runtime.engine.host import host_identity, main_identity
from aiorpc.runtime.meeting.rendezvous import Rendezvous

def record(name, number):
    token = secrets.token_hex(16)
    return WorkerRecord(name, number, token, host_identity(), "node", os.getpid(), "main", "", "127.0.0.1", 0)

"""

STAY = "\nimport signal; signal.pause()\n"

ROOT = Path(__file__).resolve().parents[2]

# The package without its ``__init__``, which imports torch: what needs no torch starts in a tenth of the time.
LIGHT = f"""
import sys, types
sys.modules["aiorpc"] = types.ModuleType("aiorpc")
sys.modules["aiorpc"].__path__ = [{str(ROOT / "aiorpc")!r}]
"""

# Says who it is, and then, for each way to start a child that it is given, who that child says it is.
MAIN_SCRIPT = f"""{LIGHT}
import multiprocessing
from aiorpc.runtime.engine.host import main_identity

def say(queue):
    queue.put(main_identity())

if __name__ == "__main__":
    print(main_identity())
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=say, args=(queue,))
        process.start()
        print(queue.get())
        process.join()
"""


def child_environment() -> dict[str, str]:
    """This environment, with the package found from any folder."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def run_python(*arguments: str, folder: Path | None = None) -> str:
    """What a Python process prints; it must succeed."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=50, check=False, cwd=folder, env=child_environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def set_environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Exactly these of the variables that env:// reads."""
    mine = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "AIORPC_INIT_METHOD")
    for name in mine:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
