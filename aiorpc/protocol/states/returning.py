"""How a new process takes the place of a departed member. `protocol.places` and `protocol.leaving` use these tables."""

from __future__ import annotations

from .table import Label, Table, Transition, from_each


class PlaceState(Label):
    """See `PLACE`."""

    HELD = "held"
    VACANT = "vacant"
    PROMISED = "promised"


class PlaceEvent(Label):
    """What takes a place from one state to the next, in the view of one worker."""

    GONE = "its member was lost, or has left in good order"
    ADMIT = "this worker leads, and admits a joining member"
    ARRIVED = "the joining member that was admitted has proved itself"
    INTRODUCED = "the leader reports who has the place now"


_P, _E = PlaceState, PlaceEvent

PLACE: Table[PlaceState, PlaceEvent] = Table(
    "place in a group of fixed size",
    about=(
        "A place is a rank, with its name. Each worker has its own view; only that of the leader decides. A "
        "joining member may go, too, and its place be taken again. There is no final state: it ends with the worker."
    ),
    initial=_P.HELD,
    meanings={
        _P.HELD: "A living member has it.",
        _P.VACANT: "Its member is gone; a new process may take it as long as the group goes on.",
        _P.PROMISED: "At the leader only: a joining member was admitted, and has not arrived.",
    },
    transitions=(
        Transition(_P.HELD, _E.GONE, _P.VACANT),
        Transition(_P.VACANT, _E.ADMIT, _P.PROMISED, "The joining member gets the roster."),
        Transition(_P.PROMISED, _E.ADMIT, _P.PROMISED, "The joining member before has not arrived: another one may."),
        Transition(_P.PROMISED, _E.ARRIVED, _P.HELD, "The leader tells all others."),
        Transition(_P.VACANT, _E.INTRODUCED, _P.HELD),
    ),
    final=(),
)


class Returning(Label):
    """See `RETURNING`."""

    ASKING = "asking"
    ARRIVING = "arriving"
    MEMBER = "member"
    OUT = "out"


class ReturnEvent(Label):
    """What takes a joining member from one state to the next."""

    ADMITTED = "the leader admits it"
    LEADER_GONE = "the leader was lost before the welcome"
    WELCOMED = "the leader reports that all know it"
    TURNED_AWAY = "it is refused, the time is up, or no other member lives"


_R, _V = Returning, ReturnEvent

RETURNING: Table[Returning, ReturnEvent] = Table(
    "joining member in a group of fixed size",
    about="A process that takes a vacant place, from its claim in the store to the end of its `init`.",
    initial=_R.ASKING,
    meanings={
        _R.ASKING: "Its claim is in the store, which the leader reads while there are vacant places.",
        _R.ARRIVING: "It has connected to the leader, which announces it to all others.",
        _R.MEMBER: "All living members know it. It is like any other one.",
        _R.OUT: (
            "If the leader was lost, and there is time, it begins anew as another joining member; otherwise its "
            "`init` raises the reason."
        ),
    },
    transitions=(
        Transition(_R.ASKING, _V.ADMITTED, _R.ARRIVING, "It knows who is in the group, and the secret."),
        Transition(_R.ARRIVING, _V.LEADER_GONE, _R.OUT, "It is unknown which members know it: its number is void."),
        Transition(_R.ARRIVING, _V.WELCOMED, _R.MEMBER),
        *from_each((_R.ASKING, _R.ARRIVING), _V.TURNED_AWAY, _R.OUT),
    ),
    final=(_R.MEMBER, _R.OUT),
)
