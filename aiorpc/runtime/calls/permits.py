"""What one caller may have run here: the rights of its role, asked before anything is imported or unpickled for it."""

from __future__ import annotations

from types import MethodType

from ...errors import NotAllowed
from ...logs import logger
from ...protocol.identity import WorkerRecord, legible
from ...rights import FETCH, Rights, is_exposed, name_of_class
from . import functions
from .functions import Handler

# Of a name that a caller has sent, so much is shown.
_SHOWN = 200


class Permits:
    """The rights of one caller. Any thread. Methods that check raise NotAllowed, which names caller, function and rule.

    A caller whose role may have everything run needs none, see `permits_of`.
    """

    def __init__(self, rights: Rights, worker: str, caller: WorkerRecord, own: bool = False) -> None:
        """worker: the name of this one. own: whether it is the caller, too: then what has a name here is its own."""
        self._rights = rights
        self._own = own
        self._worker = worker
        self._caller = caller
        self._role = caller.role
        self._logged = False

    # --- functions by name --------------------------------------------------------------------------------------------

    def may_import(self, name: str) -> bool:
        """Whether the module of that wire name may be imported for this caller: the rule has the name as it stands."""
        return self._rights.allowed(self._role, functions.normal(name))

    def find(self, name: str) -> Handler:
        """The function of a wire name. RpcUsageError if there is none. It is imported, if the name is allowed.

        Both names have to be allowed: the one that the caller has sent, and the one that the function has where it is
        defined.
        """
        sent = functions.normal(name)
        if self.may_import(name):
            handler = functions.resolve(name, self._check_way, where=f"worker {self._worker!r}")
            true = functions.name_of(handler.function)
            if true == sent or (self._rights.listed(self._role, sent) if true is None else self._allows(true)):
                return handler
            raise self.refusal(f"{name:.{_SHOWN}}, which is {true or 'defined nowhere'}")
        # Nothing is imported or asked for it: only what stands in modules that this worker has, and bears a mark.
        place = functions.find_place(sent, ask=False) if functions.is_loaded(sent) else None
        if place is not None:
            if place.within is None and functions.is_intrinsic(place.found):
                return functions.classify(place.found, sent)
            if self._rights.allowed(self._role, sent, place.found, place.within):
                handler = functions.resolve(name, where=f"worker {self._worker!r}")
                true = functions.name_of(handler.function)
                if true == sent or is_exposed(place.found):  # not what a marked class has from elsewhere
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
        """A function that comes with the call itself runs for those alone that may have everything run."""
        raise self.refusal(what)

    def check_callable(self, function: object) -> None:
        """For handlers of the runtime that call what they were given: it is allowed under its own name."""
        name = functions.name_of(function)
        if name is None:
            self.check_by_value(f"{functions.describe(function):.{_SHOWN}}, sent by value,")
        elif not self._allows(name):
            raise self.refusal(name)

    def check_script(self, qualname: str) -> None:
        """The same for a function of TorchScript, which has the name of the function that it was compiled from."""
        module, _, name = qualname.removeprefix("__torch__.").rpartition(".")
        if not self._rights.allowed(self._role, f"{module or '__main__'}:{name}"):
            raise self.refusal(f"the script function {qualname}")

    # --- references ---------------------------------------------------------------------------------------------------

    def check_method(self, value: object, method: str) -> None:
        """Whether that method of a value may be called, before it is looked up."""
        kind = type(value)
        if functions.rights_of(kind, method) is not None or not self._rights.allowed_method(self._role, kind, method):
            raise self.refusal(f"{name_of_class(type(value))}.{method:.{_SHOWN}}")

    def check_attribute(self, value: object, name: str, found: object, of: str = "") -> None:
        """The same for what is no method of the class but an attribute of the value, once that was looked up.

        It is allowed if the rule lists it by this name, or has it under the name that it has where it is defined.
        of: the name under which the value is served, if it was called by that.
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
        """Whether a value may be fetched. Its creator may: it could have called the function for its result.

        creator: the id of the worker that has made the call whose result the value is.
        """
        if creator != self._caller.id and not self._rights.allowed_value(self._role, type(value)):
            raise self.refusal(f"{name_of_class(type(value))}.{FETCH}")

    # --- what has a name ----------------------------------------------------------------------------------------------

    def check_object(self, name: str, value: object, method: str) -> None:
        """Whether that method of the object that is served under a name may be called, before it is looked up."""
        ruled = functions.rights_of(type(value), method)
        if ruled is not None:
            self.check_resource(ruled[0], name, *ruled[1])
        elif not self._rights.allowed_resource(self._role, "object", name, method):
            self.check_method(value, method)

    def check_resource(self, kind: str, name: str, *verbs: str) -> None:
        """Whether one of these verbs is allowed for what has that name. kind, verbs: as in `rights.RESOURCES`."""
        if not any(self.may(kind, name, verb) for verb in verbs):
            raise self.refusal(" or ".join(f"{kind}/{name:.{_SHOWN}}:{verb}" for verb in verbs) or f"{kind}/{name}")

    def may(self, kind: str, name: str, verb: str) -> bool:
        """Whether that verb is allowed for what has that name."""
        return self._own or self._rights.allowed_resource(self._role, kind, name, verb)

    # --- refusing -----------------------------------------------------------------------------------------------------

    def refusal(self, function: str) -> NotAllowed:
        """The error for a call of that function. The first of each connection is logged."""
        caller, role, rule = self._caller, self._role, self._rights.describe(self._role)
        shown = function if len(function) <= 2 * _SHOWN else f"{function[: 2 * _SHOWN]}..."
        shown = legible(shown)  # it is the caller's own words, and goes to the log
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
    """The rights of a caller; None if it may have everything run. worker: the record of this one."""
    if not rights.limited(caller.role):
        return None
    own = (caller.id, caller.incarnation) == (worker.id, worker.incarnation)
    return Permits(rights, worker.name, caller, own)
