"""One round: a group is started, has work to do while faults happen, and is looked at afterwards."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests import leaks
from tests.network.hosts import Network, linked
from tests.network.members import SECRET
from tests.ports import free_port
from tests.processes.workers import Child, Children, Place, processes

from .handlers import runs_in
from .invariants import judge, miscounted
from .load import LIMIT, Outcome
from .member import Assignment, live
from .plans import DEADLY, Fault, Plan

END = 1.5 * LIMIT  # seconds within which whatever is waited for has to be there: the members' own limits come before
SLICE = 0.02  # seconds: how the processor is taken from a slow member, for most of each slice


@dataclass(eq=False)
class Lifecycle:
    """One process of a round. killed, left: whether it was killed, or has been told to leave while others worked.

    joined: whether it has.
    """

    number: int
    rank: int
    child: Child
    killed: bool = False
    left: bool = False
    joined: bool = False

    @property
    def name(self) -> str:
        return self.child.place.name


@dataclass
class Verdict:
    """What came of a round. wrong: what does not hold, one line each. folder: where the members' logs are, if kept.

    phases: seconds until which each phase of the round had ended.
    """

    plan: Plan
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    operations: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    processes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    phases: dict[str, float] = field(default_factory=dict)
    folder: str = ""


def play(plan: Plan, kept_in: Path | None = None) -> Verdict:
    """A round, from the first process to the last. kept_in: where the logs stay if something is wrong."""
    began, before = time.monotonic(), leaks.take_snapshot()
    folder = tempfile.mkdtemp(prefix="chaos-", dir=kept_in)
    verdict = Verdict(plan)
    try:
        with contextlib.ExitStack() as stack:
            network = None
            if plan.hosts > 1:
                network = stack.enter_context(linked("relay", delay=plan.delay, loss=plan.loss))
            children = stack.enter_context(processes())
            a_round = Round(plan, children, Path(folder), network, verdict)
            try:
                a_round.play()
            except (AssertionError, OSError) as error:  # the latter of a pipe to a process that has ended
                lines = str(error).strip().splitlines()
                verdict.wrong.append(" ... ".join(dict.fromkeys([lines[0], lines[-1]])))  # of a traceback the ends
                a_round.tell_where_all_stand()
        verdict.wrong += leaks.wait_until_clean(before)
    finally:
        if verdict.wrong and kept_in is not None:
            verdict.folder = folder
        else:
            shutil.rmtree(folder)
    verdict.seconds = time.monotonic() - began
    return verdict


class Round:
    """See the module."""

    def __init__(self, plan: Plan, children: Children, folder: Path, network: Network | None, verdict: Verdict) -> None:
        self._plan = plan
        self._children = children
        self._folder = folder
        self._verdict = verdict
        self._rng = random.Random(f"{plan.seed}:{plan.number}:moments")
        self._lives: list[Lifecycle] = []
        self._network = network
        self._port = free_port() if plan.meeting == "tcp" else 0
        at = "127.0.0.1" if network is None else network.left.address
        self._meeting = f"tcp://{at}:{self._port}" if self._port else f"file://{folder}/store"

    def play(self) -> None:
        """All of it. AssertionError for what ends the round; what is wrong besides is noted."""
        began = time.monotonic()

        def done(phase: str) -> None:
            self._verdict.phases[phase] = round(time.monotonic() - began, 2)

        for rank in range(self._plan.size):
            self._start(rank)
        for life in self._lives:
            self._await(life)
        done("joined")
        for life in self._lives:
            life.child.tell(("load",))
        self._suffer()
        for life in self._living():
            if not life.joined:
                self._welcome(life)
        done("suffered")
        outcomes = [outcome for said in self._ask("end") for outcome in said]
        outcomes += [outcome for life in self._lives if life.left for outcome in self._hear(life)]
        done("ended")
        self._judge(outcomes)
        self._compare("does not reach", self._ask("reach", {life.name: life.child.pid for life in self._living()}))
        done("reached")
        self._compare("keeps", self._ask("settle"))
        done("settled")
        self._leave()
        done("left")

    # --- members ------------------------------------------------------------------------------------------------------

    def _start(self, rank: int) -> Lifecycle:
        plan = self._plan
        place = Place(f"w{rank}", rank, None if plan.free else plan.size, self._meeting)
        names = [f"w{each}" for each in range(plan.size)]
        number = len(self._lives)
        assignment = Assignment(
            f"{plan.seed}:{plan.number}", number, names, str(self._folder), plan.transports, plan.load
        )
        if self._network is not None:
            host = (self._network.left, self._network.right)[rank % 2]
            assignment = replace(assignment, namespace=host.namespace, address=host.address)
        secret = SECRET if self._network is not None else {}  # members of one host make one themselves
        life = Lifecycle(number, rank, self._children.start(place, live, assignment, env=secret))
        self._lives.append(life)
        if plan.free and plan.meeting == "tcp" and number == 0:  # who hosts the store is to be known
            self._await(life)
        return life

    def _await(self, life: Lifecycle) -> None:
        """Wait until it has joined."""
        if not life.joined:
            self._hear(life)
            life.joined = True

    def _welcome(self, life: Lifecycle) -> None:
        """A newcomer is given work."""
        self._await(life)
        life.child.tell(("load",))

    def _living(self) -> list[Lifecycle]:
        return [life for life in self._lives if not life.killed and not life.left]

    def _at(self, rank: int) -> Lifecycle:
        """The latest process in that place."""
        return next(life for life in reversed(self._lives) if life.rank == rank)

    def _hear(self, life: Lifecycle) -> Any:
        return life.child.hear(END)

    def _ask(self, *order: Any) -> list[Any]:
        """What each living member says to an order."""
        living = self._living()
        for life in living:
            life.child.tell(order)
        return [self._hear(life) for life in living]

    # --- faults -------------------------------------------------------------------------------------------------------

    def _suffer(self) -> None:
        """Let happen what the plan says, at its times; newcomers are given work as they join."""
        began = time.monotonic()
        for at, _, rank, what in sorted(self._moments(), key=lambda moment: moment[:2]):
            while (left := began + at - time.monotonic()) > 0:
                time.sleep(min(left, 0.01))
                self._look_for_newcomers()
            self._happen(what, rank)
        while time.monotonic() < began + self._plan.seconds:
            time.sleep(0.01)
            self._look_for_newcomers()

    def _moments(self) -> Iterator[tuple[float, int, int, str]]:
        """What is done at which moment to which place; numbered, so that they can be sorted."""
        for number, fault in enumerate(self._plan.faults):
            self._verdict.faults[fault.kind] += 1
            for at, what in _deeds(fault):
                yield at, number, fault.victim, what
            if fault.kind == "restart":
                yield fault.at + self._rng.uniform(0, 0.2), number, fault.victim, "start"

    def _happen(self, what: str, rank: int) -> None:
        life = self._at(rank)
        if what == "start":
            life.child.join(END)  # as whoever starts processes again waits for their ends
            self._start(rank)
        elif what in ("down", "up") and self._network is not None:
            (self._network.cut if what == "down" else self._network.mend)()
        elif what == "continue" and not life.killed:
            with contextlib.suppress(ProcessLookupError):  # it has left, and ended
                life.child.kill(signal.SIGCONT)
        elif life.killed or life.left:
            return
        elif what == "leave":
            life.left = True
            life.child.tell(("end",))
            life.child.tell(("leave", self._plan.free))
        elif what == "kill":
            life.killed = True
            life.child.kill()
        elif what == "stop":
            life.child.kill(signal.SIGSTOP)
        elif what == "cut":
            life.child.tell(("cut", None, 1.0, self._port or None))
        else:
            life.child.tell(("block", float(what)))

    def _look_for_newcomers(self) -> None:
        for life in self._living():
            if not life.joined and life.child.pipe.poll():
                self._welcome(life)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _judge(self, outcomes: Sequence[Outcome]) -> None:
        verdict = self._verdict
        killed = {life.child.pid: life.name for life in self._lives if life.killed}
        left = {life.child.pid: life.name for life in self._lives if life.left}
        runs = runs_in(self._folder / "runs")
        verdict.operations = len(outcomes)
        verdict.runs = runs.total()
        verdict.processes = len(self._lives)
        verdict.failed = Counter(outcome.error for outcome in outcomes if outcome.error)
        missed = {*killed.values(), *left.values()} if self._plan.free else set()
        store_died = any(life.number == 0 for life in self._lives if life.killed) and bool(self._port)
        verdict.wrong += [said for outcome in outcomes if (said := judge(outcome, killed, left, store_died, missed))]
        verdict.wrong += miscounted(outcomes, runs)

    def _compare(self, what: str, found: Sequence[dict[str, Any]]) -> None:
        for life, each in zip(self._living(), found, strict=True):
            if each:
                self._verdict.wrong.append(f"{life.name} (process {life.number}) {what} {each}")

    def _leave(self) -> None:
        killed = {life.name for life in self._lives if life.killed}
        gone = [life for life in self._lives if life.left]
        living = self._living()
        farewells = [*self._ask("leave", True), *map(self._hear, gone)]
        for life, said in zip([*living, *gone], farewells, strict=True):
            lost = set(said["lost"])
            missing = set() if self._plan.free or life.left else killed - lost - {each.name for each in living}
            if said["timed_out"] or lost - killed or missing:
                self._verdict.wrong.append(f"{life.name} left with {said}, and {sorted(killed)} were killed")
        for life in [*living, *gone]:
            left = self._hear(life)
            self._verdict.wrong += [f"{life.name} (process {life.number}) left behind: {each}" for each in left]
            code = life.child.join(END)
            if code:
                self._verdict.wrong.append(f"{life.name} (process {life.number}) ended with {code}")

    def tell_where_all_stand(self) -> None:
        """Have the living write that to their logs."""
        for life in self._living():
            with contextlib.suppress(ProcessLookupError):
                life.child.kill(signal.SIGCONT)
                life.child.kill(signal.SIGUSR2)
                life.child.kill(signal.SIGUSR1)
        time.sleep(1.0)


def _deeds(fault: Fault) -> Iterator[tuple[float, str]]:
    """What is done for a fault, and when."""
    if fault.kind in DEADLY:
        yield fault.at, "kill"
    elif fault.kind == "block":
        yield fault.at, str(fault.seconds)
    elif fault.kind in ("cut", "leave"):
        yield fault.at, fault.kind
    elif fault.kind == "line":
        yield fault.at, "down"
        yield fault.at + fault.seconds, "up"
    elif fault.kind == "stop":
        yield fault.at, "stop"
        yield fault.at + fault.seconds, "continue"
    else:
        for each in range(int(fault.seconds / SLICE)):
            yield fault.at + each * SLICE, "stop"
            yield fault.at + (each + 0.75) * SLICE, "continue"
