"""``python -m aiorpc.run``: real processes, their output, their ends, and those that come back."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from aiorpc.run import LocalProcess, LocalWorkers, commands, main
from tests.examples.programs import Outcome, Program, run_program, started

pytestmark = pytest.mark.slow
LIMIT = 100.0  # seconds for a launcher that takes about three
RUN = ("-m", "aiorpc.run")

#: Each worker calls the next one; then w0 kills w1, and calls the process that takes its place.
MEET = """
import asyncio, os, signal
import aiorpc as rpc

async def who():
    return os.getpid()

async def main():
    rank = int(os.environ["RANK"])
    async with rpc.init(f"w{rank}") as worker:
        if rank:
            # In a free group each leaves when it wants to; w0 says when.
            return await rpc.wait_for("done", timeout=60) if "WORLD_SIZE" not in os.environ else None
        await rpc.wait_for("w1", timeout=60)
        before, news = await rpc.call("w1", who), worker.events()
        os.kill(before, signal.SIGKILL)
        async for event in news:
            if isinstance(event, rpc.events.WorkerReplaced | rpc.events.WorkerJoined) and event.worker.name == "w1":
                break
        print("another process" if await rpc.call("w1", who) != before else "the same", flush=True)
        if "WORLD_SIZE" not in os.environ:
            async with rpc.init("done"):
                await asyncio.sleep(1)

asyncio.run(main())
"""

#: Says its process id, and goes on until a signal ends it; with a child that a worker that was killed leaves behind.
STAY = """
import os, signal, subprocess, sys, time
for each in sys.argv[1:]:
    signal.signal(getattr(signal, each), lambda number, frame: print("not yet", flush=True))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), child.pid)
while True:
    time.sleep(1)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def launched(folder: Path, text: str, *options: str, arguments: tuple[str, ...] = ()) -> Outcome:
    """The launcher, run to its end."""
    return run_program([*RUN, *options, script(folder, text), *arguments], folder, timeout=LIMIT)


def gone(pids: list[int]) -> bool:
    """Whether these processes end."""
    deadline = time.monotonic() + 20.0
    while (left := [pid for pid in pids if _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def pids_of(program: Program, workers: int) -> list[int]:
    """The process ids that so many workers of STAY say."""
    return [int(pid) for _ in range(workers) for pid in program.wait_for_line("[worker").split()[2:]]


def test_lines_have_the_worker_and_its_place(tmp_path: Path) -> None:
    """Whole lines, in the order in which a worker writes them, with torchrun's variables; 0 as all ended with 0."""
    text = """
import os, sys
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RESTART_COUNT OMP_NUM_THREADS"
print(*(os.environ[name] for name in names.split()), sys.argv[1:], len(os.environ["AIORPC_SECRET"]), sys.stdin.read())
for number in range(500):
    print(number)
print("to stderr", file=sys.stderr)
print("no end", end="")
"""
    outcome = launched(tmp_path, text, "--workers", "2", arguments=("--workers", "-m"))
    assert outcome.code == 0, outcome.err
    numbers = [str(number) for number in range(500)]
    for rank in (0, 1):
        prefix = f"[worker{rank}] "
        said = [line.removeprefix(prefix) for line in outcome.out.splitlines() if line.startswith(prefix)]
        first = f"{rank} 2 {rank} 2 127.0.0.1 0 1 ['--workers', '-m'] 64 "
        assert said == [first, *numbers, "no end"]
        assert f"{prefix}to stderr" in outcome.err.splitlines()
    assert len(outcome.out.splitlines()) == 2 * 502


def test_lines_come_when_they_are_written(tmp_path: Path) -> None:
    """Not when the worker ends."""
    with started([*RUN, "--workers", "1", script(tmp_path, STAY)], tmp_path) as program:
        pids = pids_of(program, 1)
        program.process.send_signal(signal.SIGTERM)
        assert program.finish(LIMIT).code == 128 + signal.SIGTERM
    assert gone(pids)


def test_one_failure_ends_all(tmp_path: Path) -> None:
    """With its status, how it ended, and what it wrote last; what the workers started ends, too."""
    text = f"""
import os, sys, time
if os.environ["RANK"] == "1":
    while not os.path.exists("go"):
        time.sleep(0.01)
    print("why it failed", file=sys.stderr)
    sys.exit(7)
{STAY}"""
    with started([*RUN, "--workers", "3", script(tmp_path, text)], tmp_path) as program:
        pids = pids_of(program, 2)
        (tmp_path / "go").touch()
        outcome = program.finish(LIMIT)
    assert outcome.code == 7
    assert re.search(r"worker1 \(rank 1, pid \d+\): exited with code 7, after\nwhy it failed\n", outcome.err)
    assert gone(pids)


def test_the_traceback_that_record_leaves_is_told(tmp_path: Path) -> None:
    """torch's error file, which the launcher names to its workers; and a death by a signal gives 128 and its number."""
    text = """
import os, signal, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("a bad value")

main()
"""
    outcome = launched(tmp_path, text, "--workers", "1")
    assert outcome.code == 1
    summary = outcome.err.split("failed, so all are ended:\n")[1]
    assert "exited with code 1\nTraceback" in summary and summary.endswith("ValueError: a bad value\n")
    outcome = launched(tmp_path, "import os; os.kill(os.getpid(), 9)", "--workers", "1")
    assert outcome.code == 128 + signal.SIGKILL and "was killed by SIGKILL" in outcome.err


@pytest.mark.parametrize("deaf", [(), ("SIGINT",), ("SIGINT", "SIGTERM")])
def test_ctrl_c_ends_all(tmp_path: Path, deaf: tuple[str, ...]) -> None:
    """SIGINT; then SIGTERM, then SIGKILL for those that go on. No process is left, and the status says which signal."""
    with started([*RUN, "--workers", "2", "--grace", "1", script(tmp_path, STAY), *deaf], tmp_path) as program:
        pids = pids_of(program, 2)
        began = time.monotonic()
        program.process.send_signal(signal.SIGINT)
        outcome = program.finish(LIMIT)
        assert time.monotonic() - began >= len(deaf)
    assert outcome.code == 128 + signal.SIGINT
    assert outcome.out.count("not yet") == 2 * len(deaf)
    assert gone(pids)


@pytest.mark.long
def test_a_second_signal_hurries(tmp_path: Path) -> None:
    """Each one brings the next stronger signal, without the grace."""
    command = [*RUN, "--workers", "1", "--grace", "600", script(tmp_path, STAY), "SIGINT", "SIGTERM"]
    with started(command, tmp_path) as program:
        pids = pids_of(program, 1)
        for _ in range(2):
            program.process.send_signal(signal.SIGINT)
            program.wait_for_line("[worker0] not yet")
        program.process.send_signal(signal.SIGINT)
        assert program.finish(LIMIT).code == 128 + signal.SIGINT
    assert gone(pids)


def test_workers_that_end_well_when_asked_are_no_failure(tmp_path: Path) -> None:
    """SIGTERM is handed on; all end with 0, and so does the launcher."""
    text = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(0))\nprint('there')\ntime.sleep(600)"
    with started([*RUN, "--workers", "1", script(tmp_path, text)], tmp_path) as program:
        program.wait_for_line("[worker0] there")
        program.process.send_signal(signal.SIGTERM)
        assert program.finish(LIMIT).code == 0


def test_a_worker_that_waits_for_its_next_start_has_not_ended_well(tmp_path: Path) -> None:
    """An engine that ends the launcher then must not take its work for done."""
    text = "import os\nprint('start', os.environ['TORCHELASTIC_RESTART_COUNT'])\nexit(3)"
    with started([*RUN, "--workers", "1", "--restart", "on-failure", script(tmp_path, text)], tmp_path) as program:
        program.wait_for_line("[worker0] start 1")
        time.sleep(0.5)  # of the two seconds that it waits
        program.process.send_signal(signal.SIGTERM)
        assert program.finish(LIMIT).code == 128 + signal.SIGTERM


def test_it_is_started_again_so_often(tmp_path: Path) -> None:
    """After a second, and two; each start knows which it is. Then all end with the status of the failure."""
    text = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(600)
print("start", os.environ["TORCHELASTIC_RESTART_COUNT"], time.monotonic())
sys.exit(3)
"""
    options = ("--workers", "2", "--restart", "on-failure", "--max-restarts", "2", "--log-dir", str(tmp_path / "logs"))
    outcome = launched(tmp_path, text, *options)
    assert outcome.code == 3
    starts = [line.split()[2:] for line in outcome.out.splitlines()]
    assert [count for count, _ in starts] == ["0", "1", "2"]
    first, second, third = (float(at) for _, at in starts)
    assert second - first >= 1.0 and third - second >= 2.0
    assert outcome.err.count("it is started again in") == 2 and "(2 of 2)" in outcome.err
    names = {path.name for path in (tmp_path / "logs").iterdir()}
    assert names == {f"worker{each}.{end}" for each in ("0.0", "1.0", "1.1", "1.2") for end in ("out", "err")}
    assert (tmp_path / "logs" / "worker1.2.out").read_text().startswith("start 2 ")


@pytest.mark.parametrize("group", [(), ("--free",)], ids=["fixed", "free"])
def test_a_worker_that_was_killed_takes_its_place(tmp_path: Path, group: tuple[str, ...]) -> None:
    """Under its name, in the same group: the call of another member that follows works."""
    outcome = launched(tmp_path, MEET, "--workers", "2", "--restart", "on-failure", *group)
    assert outcome.code == 0, outcome.err
    assert outcome.out == "[worker0] another process\n"


@pytest.mark.usefixtures("server_made_once")
def test_a_worker_is_replaced(tmp_path: Path) -> None:
    """It is killed, and another one runs at once, which is replaced and ended as the first; that is no failure."""
    seen: list[LocalProcess] = []
    start = commands(["sleep", "600"], ["one", "two"], tmp_path)

    def noted(rank: int, variables: Mapping[str, str]) -> LocalProcess:
        seen.append(start(rank, variables))
        return seen[-1]

    with LocalWorkers(noted, ["one", "two"]) as workers:
        workers.look()
        for _ in range(2):
            workers.replace(1)
            workers.look()
        assert len(seen) == 4 and [each.poll() for each in seen] == [None, -9, -9, None]
        assert workers.running and not workers.failed and workers.status(1) is None
    assert gone([each.pid for each in seen])
    assert (workers.status(0), workers.status(1), workers.running) == (-15, -15, False)


def test_a_reader_that_goes_away_ends_all(tmp_path: Path) -> None:
    """As with `| head -1`: nothing that nobody reads goes on, and there is no traceback."""
    text = "import os, time\nprint(os.getpid())\nwhile True:\n    print('more')\n    time.sleep(0.1)"
    with started([*RUN, "--workers", "1", script(tmp_path, text)], tmp_path) as program:
        pid = int(program.wait_for_line("[worker0]").split()[1])
        assert program.process.stdout is not None
        program.process.stdout.close()
        assert program.process.wait(LIMIT) == 128 + signal.SIGTERM
        assert program.process.stderr is not None and program.process.stderr.read() == ""
    assert gone([pid])


def test_modules_are_run(tmp_path: Path) -> None:
    """As `python -m` finds them: in the current folder, too."""
    (tmp_path / "mine.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    outcome = run_program([*RUN, "--workers", "1", "-m", "mine", "-x"], tmp_path, timeout=LIMIT)
    assert (outcome.code, outcome.out) == (0, "[worker0] __main__ ['-x']\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--workers", "0", __file__), "--workers must be at least 1, not 0"),
        (("--workers", "x", __file__), "invalid int value"),
        ((__file__,), "required: --workers"),
        (("--workers", "1"), "required: SCRIPT"),
        (("--workers", "1", "absent.py"), "there is no file absent.py"),
        (("--workers", "1", "-m", "absent.module"), "there is no module absent.module"),
        (("--workers", "1", "--max-restarts", "1", __file__), "--restart on-failure"),
        (("--workers", "1", "--restart", "on-failure", "--max-restarts", "-1", __file__), "must not be negative"),
        (("--workers", "1", "--restart", "always", __file__), "invalid choice: 'always'"),
        (("--workers", "1", "--grace", "-1", __file__), "--grace must be between 0"),
        (("--workers", "1", "--log-dir", f"{__file__}/x", __file__), "--log-dir: "),
        (("--workers", "1", "--log-dir", "/proc", __file__), "--log-dir: "),
    ],
)
def test_what_cannot_be_run_is_refused(capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str) -> None:
    """A usage error that says what is wrong, before anything is started."""
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
