"""How a new process takes the place of a member that is gone. `protocol.places` and `protocol.leaving` go by these."""

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
    INTRODUCED = "the leader says who has the place now"


_P, _E = PlaceState, PlaceEvent

PLACE: Table[PlaceState, PlaceEvent] = Table(
    "place in a group of fixed size",
    about=(
        "A place is a rank, with its name. Each worker has its own view; only that of the leader decides. A "
        "joining member may go, too, and its place be taken again. It has no end of its own: that is the end of "
        "the worker."
    ),
    initial=_P.HELD,
    meanings={
        _P.HELD: "A living member has it.",
        _P.VACANT: "Its member is gone; a new process may take it as long as the group goes on.",
        _P.PROMISED: "At the leader only: a joining member was admitted, and has not arrived.",
    },
    transitions=(
        Transition(_P.HELD, _E.GONE, _P.VACANT),
        Transition(_P.VACANT, _E.ADMIT, _P.PROMISED, "The joining member is told who is in the group."),
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
    LEADER_GONE = "the leader was lost before it has said so"
    WELCOMED = "the leader says that all know it"
    TURNED_AWAY = "it is refused, the time is up, or nobody else lives"


_R, _V = Returning, ReturnEvent

RETURNING: Table[Returning, ReturnEvent] = Table(
    "joining member in a group of fixed size",
    about="A process that takes a vacant place, from its claim in the store to the end of its `init`.",
    initial=_R.ASKING,
    meanings={
        _R.ASKING: "Its claim stands in the store, where the leader looks as long as there are vacant places.",
        _R.ARRIVING: "It has connected to the leader, which tells all others of it.",
        _R.MEMBER: "All living members know it. It is as any other one.",
        _R.OUT: (
            "If the leader was lost, and there is time, it begins anew as another joining member; else its "
            "`init` raises, and says why."
        ),
    },
    transitions=(
        Transition(_R.ASKING, _V.ADMITTED, _R.ARRIVING, "It knows who is in the group, and the secret."),
        Transition(_R.ARRIVING, _V.LEADER_GONE, _R.OUT, "Nobody can tell who has heard of it: its number is void."),
        Transition(_R.ARRIVING, _V.WELCOMED, _R.MEMBER),
        *from_each((_R.ASKING, _R.ARRIVING), _V.TURNED_AWAY, _R.OUT),
    ),
    final=(_R.MEMBER, _R.OUT),
)
