"""Ray with two nodes on this machine: the programs of `ray_program`, and the one that its page shows."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import pages

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.time_limit(240)]
PAGE = "clusters/ray.md"
ENDING = 60.0  # seconds for a process that has to end, which takes about five


class TwoNodes:
    """Ray's cluster, of the program `two_nodes`."""

    def __init__(self, process: subprocess.Popen[str], environment: dict[str, str]) -> None:
        self.environment = environment
        self._process = process

    def do(self, word: str) -> None:
        """Tell it to `kill` its second node, or to `add` one."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self.read() == word

    def read(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    """Started once for all tests here."""
    assert importlib.util.find_spec("ray") is not None, "there is no Ray: run `make testcluster`"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short: Ray makes sockets in it
        environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # Ray warns of its default otherwise
        with _python("-m", "tests.cluster.two_nodes", cwd=pages.ROOT, env=environment) as process:
            made = TwoNodes(process, environment)
            environment["RAY_ADDRESS"] = made.read()
            assert environment["RAY_ADDRESS"], "Ray has not started"
            yield made


@contextlib.contextmanager
def _python(*arguments: str, cwd: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A program that ends when its stdin does, or is killed."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-u", *arguments]
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
            if process.stdin is not None:
                process.stdin.close()
            process.wait(ENDING)
        finally:
            process.kill()


def run(nodes: TwoNodes, name: str, at_mark: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str]:
    """One of `ray_program`: its exit status and output. at_mark: called with it when it writes the line `now`."""
    text = []
    with _python("-m", "tests.cluster.ray_program", name, cwd=pages.ROOT, env=nodes.environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            text.append(line)
            if line == "now\n":
                at_mark(process)
    return process.returncode, "".join(text)


def _nothing(_: object) -> None:
    pass


def test_a_worker_comes_back_when_its_node_dies(nodes: TwoNodes) -> None:
    """On the other node, under its name; the driver calls it before and after."""
    code, text = run(nodes, "node_dies", lambda _: nodes.do("kill"))
    nodes.do("add")
    assert code == 0, text


def test_a_task_joins_by_invitation_and_a_stranger_does_not(nodes: TwoNodes) -> None:
    """A stranger without the secret, and with another one. And an actor that Ray does not start again is told of."""
    code, text = run(nodes, "guests", _nothing)
    assert code == 0, text
    assert len(re.findall(r"^refused: .*AIORPC_SECRET", text, re.MULTILINE)) == 2, text


def test_what_cannot_be_leaves_nothing_behind(nodes: TwoNodes) -> None:
    """A setup that fails, no room, options that Ray does not have; and a block that raises."""
    code, text = run(nodes, "refusals", _nothing)
    assert code == 0, text


def test_an_interrupt_ends_all_actors(nodes: TwoNodes) -> None:
    """Of a program that is stopped by Ctrl-C."""
    code, text = run(nodes, "interrupted", lambda process: process.send_signal(signal.SIGINT))
    assert "\ngone\n" in text and "KeyboardInterrupt" in text and code != 0, text


def test_the_program_of_the_page_goes_on_from_its_checkpoint(nodes: TwoNodes, tmp_path: Path) -> None:
    """It is run twice, in a directory of its own."""
    [(name, source)] = pages.files(PAGE).items()
    (tmp_path / name).write_text(source)
    for updates, expected in (("2", ["update 1", "update 2"]), ("3", ["update 3"])):
        with _python(name, updates, cwd=tmp_path, env=nodes.environment) as process:
            assert process.stdout is not None
            text = process.stdout.read()
        assert re.findall(r"^update \d+", text, re.MULTILINE) == expected, text
        assert text.count("of actor0, actor1") == len(expected), text
        assert "RayMember.serve failed" not in text, text
        assert process.returncode == 0, text
