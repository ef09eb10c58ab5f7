"""What became of a call to several workers: for each of them its value, or its error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, cast, overload

from ... import foreign
from ..._typing import T_co
from ...errors import GroupError, PeerLeft, PeerLost, PeerRefused, RpcError
from ...sites import Unobserved
from ..calls.failures import came_from_afar

_GONE = (PeerLost, PeerLeft, PeerRefused)


class Outcome(NamedTuple, Generic[T_co]):
    """What one member answered. name: the member. value: what its function returned; None if there is an error.

    error: what it raised, or why there is no answer; None for a value. answered: whether value or error came from it.
    """

    name: str
    value: T_co | None
    error: BaseException | None
    answered: bool

    def result(self) -> T_co:
        """The value; raises the error."""
        if self.error is None:
            return cast(T_co, self.value)
        try:
            raise foreign.with_traceback(self.error, None)  # not with that of the last time
        finally:
            del self  # the traceback holds this frame

    @property
    def lost(self) -> bool:
        """Whether the member died or left before it answered, or cannot be reached."""
        return not self.answered and foreign.is_a(self.error, _GONE)

    @property
    def missing(self) -> bool:
        """Whether there is no answer of it though it may live: it was late, not waited for, or could not be asked."""
        return not self.answered and not self.lost


class Outcomes(Sequence[Outcome[T_co]], Generic[T_co]):
    """What all members answered, in the order of members. ``outcomes["a0"]`` is that of one, as ``outcomes[0]`` is.

    Without a quorum an error that was not looked at is logged, as that of a call is; to look at any of the outcomes
    is enough.
    """

    def __init__(self, outcomes: Sequence[Outcome[T_co]], function: str) -> None:
        self._all = tuple(outcomes)
        self._function = function
        self._unobserved: Unobserved | None = None

    def _watch(self, what: str) -> None:
        """Log it if the errors are not looked at. what: names them in the log."""
        # Without the errors themselves: the twin has it, too.
        self._unobserved = Unobserved(what, GroupError(str(self._failure(f"of {len(self)} members"))))

    def _twin(self) -> Outcomes[T_co]:
        """The same, with errors that are never raised: these have no tracebacks."""
        if all(outcome.error is None for outcome in self._all):
            return self
        twin = Outcomes([outcome._replace(error=_twin_of(outcome.error)) for outcome in self._all], self._function)
        twin._unobserved = self._unobserved
        return twin

    def _mark_seen(self) -> None:
        """The errors were looked at."""
        if self._unobserved is not None:
            self._unobserved.seen = True

    @property
    def _outcomes(self) -> tuple[Outcome[T_co], ...]:
        self._mark_seen()
        return self._all

    def values(self) -> list[T_co]:
        """The values of all members, in their order. GroupError with the errors of those that have none."""
        if any(outcome.error is not None for outcome in self._outcomes):
            raise self._failure(f"of {len(self)} members")
        return [cast(T_co, outcome.value) for outcome in self._outcomes]

    @property
    def answers(self) -> dict[str, T_co]:
        """The values that there are, by the names of the members."""
        return {outcome.name: cast(T_co, outcome.value) for outcome in self._outcomes if outcome.error is None}

    @property
    def errors(self) -> dict[str, BaseException]:
        """The errors in place of values, by the names of the members; the lost and the missing are among them."""
        return {outcome.name: outcome.error for outcome in self._outcomes if outcome.error is not None}

    @property
    def lost(self) -> tuple[str, ...]:
        """The names of the members that died, left or could not be reached before they answered."""
        return tuple(outcome.name for outcome in self._outcomes if outcome.lost)

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the members of which there is no answer, though they may live. See `Outcome.missing`."""
        return tuple(outcome.name for outcome in self._outcomes if outcome.missing)

    def _failure(self, wanted: str) -> GroupError:
        """The error that tells who gave no value. wanted: of how many values, in words."""
        failed = [outcome for outcome in self._all if outcome.error is not None]
        shown = ", ".join(f"{outcome.name!r}: {_said(outcome)}" for outcome in failed[:4])
        rest = f", and {len(failed) - 4} more" if len(failed) > 4 else ""
        text = f"{len(failed)} {wanted} gave no value for {self._function} ({shown}{rest})"
        error = GroupError(text, [_as_exception(outcome.error) for outcome in failed])
        error.failed = tuple(outcome.name for outcome in failed if outcome.answered)
        error.lost = tuple(outcome.name for outcome in failed if outcome.lost)
        error.missing = tuple(outcome.name for outcome in failed if outcome.missing)
        return error

    def __len__(self) -> int:
        return len(self._all)

    def __reduce__(self) -> tuple[object, ...]:
        return Outcomes, (self._outcomes, self._function)

    def __iter__(self) -> Iterator[Outcome[T_co]]:
        return iter(self._outcomes)

    @overload
    def __getitem__(self, which: int | str) -> Outcome[T_co]: ...

    @overload
    def __getitem__(self, which: slice) -> tuple[Outcome[T_co], ...]: ...

    def __getitem__(self, which: int | str | slice) -> Outcome[T_co] | tuple[Outcome[T_co], ...]:
        """By place, or by the name of a member. KeyError if there is no such member."""
        if not isinstance(which, str):
            return self._outcomes[which]
        for outcome in self._outcomes:
            if outcome.name == which:
                return outcome
        raise KeyError(which)

    def __repr__(self) -> str:
        values = sum(outcome.error is None for outcome in self._all)
        lost, missing = (sum(getattr(outcome, kind) for outcome in self._all) for kind in ("lost", "missing"))
        errors = len(self) - values - lost - missing
        counts = f"{values} values, {errors} errors, {lost} lost, {missing} missing"
        return f"<aiorpc.types.Outcomes of {self._function}: {counts}>"


def _twin_of(error: BaseException | None) -> BaseException | None:
    if error is None:
        return None
    twin = foreign.copy_of(error) or RpcError(foreign.said(error))
    if not came_from_afar(error):  # its cause was raised here, and has a traceback
        foreign.set_cause(twin, None)
    return twin


def _said(outcome: Outcome[object]) -> str:
    assert outcome.error is not None, "only members without a value are told"
    return "lost" if outcome.lost else foreign.name_of(outcome.error)


def _as_exception(error: BaseException | None) -> Exception:
    """For the group of errors, which holds nothing else."""
    if foreign.is_a(error, Exception):
        return error  # type: ignore[return-value]  # as was just seen, past what its class may say of itself
    assert error is not None
    wrapped = RpcError(foreign.said(error))
    wrapped.__cause__ = error
    return wrapped
