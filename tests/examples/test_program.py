"""What the examples share as programs: options and settings, exit codes, pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aiorpc.examples._shared.launch import WorkerFailed
from aiorpc.examples._shared.program import CommandLine, exit_code, tell


@dataclass(frozen=True)
class Settings:
    """Of each kind that examples have."""

    num_steps: int = 3
    lr: float = 0.5
    name: str = "one"
    sizes: tuple[int, ...] = (1, 2)
    batch: bool = True
    seed: int = 7
    timeout: float = 60.0


def command_line() -> CommandLine[Settings]:
    made = CommandLine("nothing", "Does nothing.", Settings())
    made.option("num_steps", "how many", least=2, why="one is none")
    made.option("lr")
    made.option("name", choices=("one", "two"))
    made.option("sizes")
    made.add_argument("--no-batch", dest="batch", action="store_false")
    made.common_options(picture="nothing")
    return made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--num-steps 1", "--num-steps must be at least 2: one is none"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'"),
        ("--lr 0", "--lr must be above 0, and finite"),
        ("--lr=-0.5", "--lr must be above 0, and finite"),
        ("--lr nan", "--lr must be above 0, and finite"),
        ("--lr inf", "--lr must be above 0, and finite"),
        ("--seed=-1", "--seed must be at least 0, and less than 4,294,967,296"),
        ("--seed 4294967296", "--seed must be at least 0, and less than 4,294,967,296"),
        ("--name three", "argument --name: invalid choice"),
        ("--sizes", "argument --sizes: expected at least one argument"),
        ("--lr 2", "no more than 1"),
        ("--timeout 0", "--timeout must be above 0 seconds, and at most 1,000,000"),
        ("--timeout nan", "--timeout must be above 0"),
        ("--timeout inf", "--timeout must be above 0"),
        ("--picture /dev/null/p.png", "--picture: cannot write /dev/null/p.png: [Errno"),
        ("--picture /", "--picture: cannot write /: it is a directory"),
    ],
)
def test_what_cannot_be_run_is_a_usage_error(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By its type, its least value, or the program's own check; nothing is run."""
    line = command_line()

    def check(settings: Settings) -> None:
        if settings.lr > 1:
            line.error("no more than 1")

    def run(settings: Settings) -> dict[str, Any]:
        raise AssertionError("it was run")

    with pytest.raises(SystemExit) as ended:
        line.main(options.split(), run, lambda result: [], check=check)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def raises(error: BaseException) -> Callable[[], None]:
    def program() -> None:
        raise error

    return program


def test_exit_codes_are_those_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """0, 1 for a worker's failure, 130 for Ctrl-C, each with a word on stderr; errors of the program itself go on."""
    assert exit_code(lambda: None) == 0
    assert exit_code(raises(WorkerFailed("w1 died", ["w1"]))) == 1
    assert exit_code(raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "error: w1 died\ninterrupted\n"
    with pytest.raises(ValueError, match="mine"):
        exit_code(raises(ValueError("mine")))


def test_a_picture_that_cannot_be_written_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """After the result, which is not lost; the exit code says so."""

    def draw(result: dict[str, Any], path: Path) -> None:
        raise OSError(28, "No space left on device")

    assert exit_code(lambda: tell({}, lambda result: ["the result"], draw, "p.png")) == 1
    said = capsys.readouterr()
    assert said.out == "the result\n"
    assert said.err == "error: cannot write p.png: [Errno 28] No space left on device\n"
