"""Authorization: the rights of a caller's role, checked before anything is imported or unpickled for it."""

from __future__ import annotations

from types import MethodType

from ...errors import NotAllowed
from ...logs import logger
from ...protocol.identity import WorkerRecord, legible
from ...rights import FETCH, Rights, is_exposed, name_of_class
from . import functions
from .functions import Handler

# Characters shown of a name that a caller has sent.
_SHOWN = 200


class Permits:
    """The rights of one caller. Any thread. Methods that check raise NotAllowed, which names caller, function and rule.

    A caller without limits has none, see `permits_of`.
    """

    def __init__(self, rights: Rights, worker: str, caller: WorkerRecord, own: bool = False) -> None:
        """worker: this worker's name. own: whether it is the caller, too, and so owns all named objects here."""
        self._rights = rights
        self._own = own
        self._worker = worker
        self._caller = caller
        self._role = caller.role
        self._logged = False

    # --- functions by name --------------------------------------------------------------------------------------------

    def may_import(self, name: str) -> bool:
        """Whether the module of that wire name may be imported for this caller: the rule allows that very name."""
        return self._rights.allowed(self._role, functions.normal(name))

    def find(self, name: str) -> Handler:
        """The function of a wire name, imported if the name is allowed. RpcUsageError if there is none.

        Both the sent name and the function's own name have to be allowed.
        """
        sent = functions.normal(name)
        if self.may_import(name):
            handler = functions.resolve(name, self._check_way, where=f"worker {self._worker!r}")
            true = functions.name_of(handler.function)
            if true == sent or (self._rights.listed(self._role, sent) if true is None else self._allows(true)):
                return handler
            raise self.refusal(f"{name:.{_SHOWN}}, which is {true or 'defined nowhere'}")
        # Nothing is imported, and no code runs: only marked functions in imported modules are left.
        place = functions.find_place(sent, ask=False) if functions.is_loaded(sent) else None
        if place is not None:
            if place.within is None and functions.is_intrinsic(place.found):
                return functions.classify(place.found, sent)
            if self._rights.allowed(self._role, sent, place.found, place.within):
                handler = functions.resolve(name, where=f"worker {self._worker!r}")
                true = functions.name_of(handler.function)
                if true == sent or is_exposed(place.found):  # not an inherited or imported member of a marked class
                    return handler
        raise self.refusal(name)

    def _check_way(self, name: str) -> None:
        if functions.leads_astray(name):
            raise self.refusal(name)

    def _allows(self, name: str) -> bool:
        place = functions.find_place(name, ask=False)
        found, within = (None, None) if place is None else place
        return self._rights.allowed(self._role, name, found, within)

    def check_by_value(self, what: str = "a function that was sent by value") -> None:
        """Raise: a function sent by value runs only for callers without limits."""
        raise self.refusal(what)

    def check_callable(self, function: object) -> None:
        """For handlers of the runtime that call a function of their arguments: it needs permission under its own
        name."""
        name = functions.name_of(function)
        if name is None:
            self.check_by_value(f"{functions.describe(function):.{_SHOWN}}, sent by value,")
        elif not self._allows(name):
            raise self.refusal(name)

    def check_script(self, qualname: str) -> None:
        """The same for a TorchScript function, under the name of the function from which it was compiled."""
        module, _, name = qualname.removeprefix("__torch__.").rpartition(".")
        if not self._rights.allowed(self._role, f"{module or '__main__'}:{name}"):
            raise self.refusal(f"the script function {qualname}")

    # --- references ---------------------------------------------------------------------------------------------------

    def check_method(self, value: object, method: str) -> None:
        """Check that a method of a value may be called, before the look-up."""
        kind = type(value)
        if functions.rights_of(kind, method) is not None or not self._rights.allowed_method(self._role, kind, method):
            raise self.refusal(f"{name_of_class(type(value))}.{method:.{_SHOWN}}")

    def check_attribute(self, value: object, name: str, found: object, of: str = "") -> None:
        """The same for an attribute of the value that is no method of its class, after the look-up.

        It is allowed if the rule lists it by this name, or allows its own name. of: the name of the served object, if
        it was called by one.
        """
        if self._rights.listed(self._role, f"{name_of_class(type(value))}.{name}"):
            return
        if of and self._rights.listed_method(self._role, of, name):
            return
        if isinstance(found, MethodType):
            self.check_method(found.__self__, found.__name__)
            return
        true = functions.name_of(found)
        if true is None:
            self.check_method(found, "__call__")
        elif not self._allows(true):
            raise self.refusal(f"{name_of_class(type(value))}.{name:.{_SHOWN}}, which is {true}")

    def check_value(self, value: object, creator: int) -> None:
        """Check that a value may be fetched. Its creator may: it could have called the function for its result.

        creator: the id of the worker that has made the call whose result the value is.
        """
        if creator != self._caller.id and not self._rights.allowed_value(self._role, type(value)):
            raise self.refusal(f"{name_of_class(type(value))}.{FETCH}")

    # --- named objects ------------------------------------------------------------------------------------------------

    def check_object(self, name: str, value: object, method: str) -> None:
        """Check that a method of a named object may be called, before the look-up."""
        ruled = functions.rights_of(type(value), method)
        if ruled is not None:
            self.check_resource(ruled[0], name, *ruled[1])
        elif not self._rights.allowed_resource(self._role, "object", name, method):
            self.check_method(value, method)

    def check_resource(self, kind: str, name: str, *verbs: str) -> None:
        """Check that one of these verbs is allowed for a named object. kind, verbs: as in `rights.RESOURCES`."""
        if not any(self.may(kind, name, verb) for verb in verbs):
            raise self.refusal(" or ".join(f"{kind}/{name:.{_SHOWN}}:{verb}" for verb in verbs) or f"{kind}/{name}")

    def may(self, kind: str, name: str, verb: str) -> bool:
        """Whether that verb is allowed for a named object."""
        return self._own or self._rights.allowed_resource(self._role, kind, name, verb)

    # --- refusing -----------------------------------------------------------------------------------------------------

    def refusal(self, function: str) -> NotAllowed:
        """The error for a call of that function. The first of each connection is logged."""
        caller, role, rule = self._caller, self._role, self._rights.describe(self._role)
        shown = function if len(function) <= 2 * _SHOWN else f"{function[: 2 * _SHOWN]}..."
        shown = legible(shown)  # the caller's words, for the log
        deed = f"have {shown} run" if "/" not in shown else f"do {shown}"
        error = NotAllowed(
            f"worker {caller.name!r} may not {deed} on worker {self._worker!r}, whose option {rule}",
            worker=self._worker,
            caller=caller.name,
            role=role,
            function=shown,
            rule=rule,
        )
        if not self._logged:
            self._logged = True
            logger.of(self._worker).warning("refused a call, and later ones of this connection silently: %s", error)
        return error


def permits_of(rights: Rights, worker: WorkerRecord, caller: WorkerRecord) -> Permits | None:
    """The rights of a caller; None without limits. worker: this worker's record."""
    if not rights.limited(caller.role):
        return None
    own = (caller.id, caller.incarnation) == (worker.id, worker.incarnation)
    return Permits(rights, worker.name, caller, own)
