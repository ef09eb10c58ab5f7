"""What the examples have in common as programs: options for the fields of their settings, errors, pictures."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from aiorpc.run import WorkerFailed

from .launch import place_from_environment

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from matplotlib.figure import Figure

SettingsT = TypeVar("SettingsT", bound="DataclassInstance")
Result = dict[str, Any]
Lines = Callable[[Result], Sequence[str]]
Draw = Callable[[Result, Path], None]


#: Seconds that a run may be given at most; for longer times the system's waits have no numbers.
LONGEST = 1_000_000
#: From here on some of the seeds that are made of it, a thousand times as large, would be none for a generator.
SEEDS = 1 << 32


class CannotDraw(RuntimeError):
    """The picture of a run cannot be written."""


class _Least(NamedTuple):
    """The smallest value that a field may have. why: the end of the error text."""

    field: str
    value: int
    why: str


class CommandLine(argparse.ArgumentParser, Generic[SettingsT]):
    """The command line of ``python -m aiorpc.examples.<name>``: an option may set a field of the settings.

    defaults: the settings when no option is given.
    """

    def __init__(self, name: str, description: str, defaults: SettingsT) -> None:
        super().__init__(prog=f"python -m aiorpc.examples.{name}", description=description)
        self.default_settings = defaults
        self._least: list[_Least] = []

    def option(
        self, field: str, help: str | None = None, *, least: int | None = None, why: str = "", **more: Any
    ) -> None:
        """An option for that field: of its type, with its default, for a tuple with one value or several.

        least, why: smaller values are refused, for that reason. more: as for ``add_argument``.
        """
        default = getattr(self.default_settings, field)
        several = isinstance(default, tuple)
        given = {"type": type(default[0] if several else default), "default": default, "help": help}
        self.add_argument(_flag(field), **given | ({"nargs": "+"} if several else {}) | more)
        if least is not None:
            self._least.append(_Least(field, least, why and f": {why}"))

    def common_options(self, picture: str | None = None) -> None:
        """The seed, the seconds for the run and, if something is drawn, where to. picture: what is drawn."""
        self.option("seed")
        self.option("timeout", "seconds for the whole run")
        if picture is not None:
            self.add_argument("--picture", metavar="FILE", help=f"draw {picture} into this PNG file")

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The arguments. Ends with a usage error for an argument beyond its bounds, or a picture that cannot be
        written.
        """
        arguments = self.parse_args(argv)
        for field, value, why in self._least:
            if getattr(arguments, field) < value:
                self.error(f"{_flag(field)} must be at least {value}{why}")
            place = place_from_environment() if field == "world_size" else None  # who has the word then
            if place is not None and place.world_size < value:
                self.error(f"it needs at least {value} workers, and the launcher started {place.world_size}{why}")
        if not 0 < getattr(arguments, "timeout", 1) <= LONGEST:
            self.error(f"--timeout must be above 0 seconds, and at most {LONGEST:,}")
        if not 0 <= getattr(arguments, "seed", 0) < SEEDS:
            self.error(f"--seed must be at least 0, and less than {SEEDS:,}")
        if not 0 < getattr(arguments, "lr", 1) < math.inf:  # not a number is refused, too
            self.error("--lr must be above 0, and finite")
        if getattr(arguments, "picture", None):
            self.check_picture("--picture", Path(arguments.picture))
        return arguments

    def check_picture(self, flag: str, path: Path) -> None:
        """End with a usage error if no picture can be drawn there: a run may be long, and would be for nothing."""
        if importlib.util.find_spec("matplotlib") is None:
            self.error(f"{flag} needs matplotlib: pip install 'aiorpc-torch[examples]'")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
                self.error(f"{flag}: cannot write {path}: it is a directory, or there is no permission")
        except OSError as error:
            self.error(f"{flag}: cannot write {path}: {error}")

    def settings(self, arguments: argparse.Namespace) -> SettingsT:
        """What was chosen."""
        names = {each.name for each in fields(self.default_settings)}
        given = {name: value for name, value in vars(arguments).items() if name in names}
        return replace(
            self.default_settings,
            **{name: tuple(value) if type(value) is list else value for name, value in given.items()},
        )

    def need_workers(self, count: int) -> None:
        """End with a usage error if a launcher started another number of them."""
        place = place_from_environment()
        if place is not None and place.world_size != count:
            self.error(f"it needs {count} workers, and the launcher started {place.world_size}")

    def main(
        self,
        argv: Sequence[str] | None,
        run: Callable[[SettingsT], Result | None],
        lines: Lines,
        draw: Draw | None = None,
        check: Callable[[SettingsT], None] | None = None,
    ) -> int:
        """Run the program and tell its result; returns the exit code. check: ends with `error` what cannot be run."""
        arguments = self.parse(argv)
        settings = self.settings(arguments)
        if check is not None:
            check(settings)
        return exit_code(lambda: tell(run(settings), lines, draw, getattr(arguments, "picture", None)))


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def exit_code(program: Callable[[], None]) -> int:
    """Run it to its end: 0, or 1 if a worker failed or the picture cannot be written, 130 after Ctrl-C.

    What went wrong goes to stderr.
    """
    try:
        program()
    except (WorkerFailed, CannotDraw) as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def tell(result: Result | None, lines: Lines, draw: Draw | None, picture: str | None) -> None:
    """Print the lines of a result, and draw it if a picture is wanted. Ranks without a result say nothing."""
    if result is None:
        return
    print("\n".join(lines(result)))
    if picture and draw is not None:
        try:
            draw(result, Path(picture))
        except OSError as error:
            raise CannotDraw(f"cannot write {picture}: {error}") from error
        print(f"wrote {picture}")


@contextlib.contextmanager
def figure(path: Path, width: float, height: float, *, grid: bool = False) -> Iterator[Figure]:
    """A figure of so many inches, which the end of the block writes into the PNG file at ``path``.

    grid: with lines at the marks of the y axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    yield made
    for axes in made.axes:
        axes.spines[["top", "right"]].set_visible(False)
        if grid:
            axes.grid(axis="y", color="0.9")
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=150, format="png")  # regardless of the file's name
