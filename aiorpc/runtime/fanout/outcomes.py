"""The outcomes of a call to several workers: for each its value or its error."""

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

    error: its error, or why there is no answer; None for a value. answered: whether value or error came from it.
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
            raise foreign.with_traceback(self.error, None)  # without an earlier traceback
        finally:
            del self  # the traceback holds this frame

    @property
    def lost(self) -> bool:
        """Whether the member died or left before it answered, or cannot be reached."""
        return not self.answered and foreign.is_a(self.error, _GONE)

    @property
    def missing(self) -> bool:
        """Whether a member that may live gave no answer: it was late, not waited for, or could not be asked."""
        return not self.answered and not self.lost


class Outcomes(Sequence[Outcome[T_co]], Generic[T_co]):
    """The outcomes of all members, in the order of members; ``outcomes["a0"]`` and ``outcomes[0]`` give one.

    Without a quorum, errors are logged if the program looks at none of the outcomes, as for a single call.
    """

    def __init__(self, outcomes: Sequence[Outcome[T_co]], function: str) -> None:
        self._all = tuple(outcomes)
        self._function = function
        self._unobserved: Unobserved | None = None

    def _watch(self, what: str) -> None:
        """Log the errors if the program looks at none of the outcomes. what: names the call in the log."""
        # Without the errors themselves: the twin shares it.
        self._unobserved = Unobserved(what, GroupError(str(self._failure(f"of {len(self)} members"))))

    def _twin(self) -> Outcomes[T_co]:
        """A copy whose errors are never raised and get no tracebacks."""
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
        """The values of all members, in their order. Raises GroupError with the errors of members without a value."""
        if any(outcome.error is not None for outcome in self._outcomes):
            raise self._failure(f"of {len(self)} members")
        return [cast(T_co, outcome.value) for outcome in self._outcomes]

    @property
    def answers(self) -> dict[str, T_co]:
        """The values, by the names of the members that gave one."""
        return {outcome.name: cast(T_co, outcome.value) for outcome in self._outcomes if outcome.error is None}

    @property
    def errors(self) -> dict[str, BaseException]:
        """The errors, by the names of the members; those of lost and missing members are among them."""
        return {outcome.name: outcome.error for outcome in self._outcomes if outcome.error is not None}

    @property
    def lost(self) -> tuple[str, ...]:
        """The names of the members that died, left or could not be reached before they answered."""
        return tuple(outcome.name for outcome in self._outcomes if outcome.lost)

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the members that may live and gave no answer. See `Outcome.missing`."""
        return tuple(outcome.name for outcome in self._outcomes if outcome.missing)

    def _failure(self, wanted: str) -> GroupError:
        """The error that names the members without a value. wanted: of how many values, in words."""
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
    """An error as an Exception, for an ExceptionGroup."""
    if foreign.is_a(error, Exception):
        return error  # type: ignore[return-value]  # checked above, past what its class may claim
    assert error is not None
    wrapped = RpcError(foreign.said(error))
    wrapped.__cause__ = error
    return wrapped
