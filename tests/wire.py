"""What docs/inside/wire.md says: the frames and every message, made from the declarations of their classes.

The docstring of a class says what its message means, and the comments that begin with ``#:`` above its fields what
those are; they are read from the source, since nothing else has comments.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

from aiorpc.channels import arena, bulk, shared_messages
from aiorpc.channels.device import messages as device_messages
from aiorpc.protocol import families, frames, handshake, messages, publication, reference_messages, trace_context
from aiorpc.protocol.families import Family
from aiorpc.protocol.frames import Kind
from aiorpc.runtime.links import messages as link_messages

COMMAND = "python -m tests.documents --write"
WIDTH = 120
# How the direction of a kind is shown in its comment in the source, and here.
WAYS = {">": "opener", "<": "acceptor", "=": "both"}


def whole() -> str:
    """The document."""
    parts = [
        "# The wire",
        f"Made from the classes in `aiorpc/protocol/messages.py` and its neighbours by `{COMMAND}`; do not edit it.",
        "## Frames",
        prose(
            "All numbers are little-endian. A connection carries frames in both directions; calls go only from the "
            "side that opened it."
        ),
        said_of(frames),
        table(("kind", "sent by", "what it means"), kinds()),
        prose(
            "Every length is compared with its limit before memory is taken for it. Before the proof a body has at "
            f"most {handshake.MAX_BODY} bytes, and no segments. An unknown kind, a wrong magic byte or a body that is "
            "not what its kind says closes the connection."
        ),
        "## Handshake",
        prose(
            "The body of a PROOF and of a WELCOME is a number of 64 bits, and the proof itself, which is made over "
            "that, too. The number says how many bytes of tensors of one message this side takes "
            "(`max_incoming_bytes`); where a connection goes on, how many of its frames it has received. The body of "
            "a REFUSED is the reason as text, of 500 bytes at most. That of a HELLO:"
        ),
        *map(section, (handshake.Hello, handshake.Introduction, handshake.Challenge)),
        "## Messages",
        prose(first_part(messages)),
        *map(section, (*dict.fromkeys(messages.CLASSES.values()),)),
        "## Inside of messages",
        *map(section, (messages.Values, messages.Recorded)),
        *map(section, (messages.ByName, messages.Method, messages.ObjectMethod, messages.Fetch)),
        *map(
            section,
            (
                reference_messages.PassedReference,
                reference_messages.ReferenceId,
                messages.TensorEntry,
                trace_context.TraceContext,
            ),
        ),
        "## Reference counting",
        prose(
            "The body of a REFERENCE is the array of a word and the fields behind it. [counting.md](counting.md) says "
            "when each is sent."
        ),
        *family(reference_messages.MESSAGES),
        "## What workers say of published values",
        prose(first_part(publication)),
        *map(section, publication.MESSAGES),
        section(publication.SlotOffer),
        "## What channels say",
        prose(first_part(families)),
        "### Channel 0: the link itself",
        *family(link_messages.MESSAGES),
        "### Channel 1: shared memory",
        *family(shared_messages.MESSAGES),
        *map(section, (arena.Block, shared_messages.Lent, shared_messages.LentPart)),
        "### Channel 2: bulk",
        "All that it says goes with its chunks.",
        section(bulk.BulkTransfer),
        "### Channel 3: inline",
        "It says nothing, and its wire is empty: the buffer is the next segment of the frame.",
        "### Channel 4: devices",
        *family(device_messages.MESSAGES),
        *map(
            section,
            (device_messages.DeviceTransfer, device_messages.FilledSlot, device_messages.Slot, device_messages.Span),
        ),
    ]
    head, channels, rest = "\n\n".join(parts).partition("## What channels say")
    # Channels alone have a level more.
    return head.replace("\n#### ", "\n### ") + channels + rest + "\n"


def said_of(module: Any) -> str:
    """The layout and the invariants that the docstring of `frames` has."""
    _, layout, rest = inspect.cleandoc(module.__doc__).split("\n\n", 2)
    return "\n\n".join(part for part in (layout, *rest.split("\n\n")) if not part.startswith("Layout"))


def first_part(module: Any) -> str:
    """The second paragraph of a module's docstring: the first one says what the module is."""
    paragraphs = inspect.cleandoc(module.__doc__).split("\n\n")
    return " ".join(paragraphs[1].split())


def prose(text: str) -> str:
    """A paragraph."""
    return "\n".join(textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def kinds() -> list[tuple[str, ...]]:
    """The rows of the table of kinds."""
    rows: list[tuple[str, ...]] = []
    for line in inspect.getsource(Kind).splitlines():
        name, equals, rest = line.strip().partition(" = ")
        if equals and name.isupper():
            number, _, about = rest.partition("  # ")
            rows.append((f"{number} {name}", WAYS[about[0]], about[2:]))
    return rows


def family(declared: Family[Any]) -> list[str]:
    """The sections of a family's messages."""
    return [section(each, word) for word, each in declared.classes.items()]


def section(declared: type[Any], word: str = "") -> str:
    """What a class declares. word: what it has on the wire before its fields, if it is of a family."""
    title = f"#### {declared.__name__}" + (f": `{word!r}`" if word else "")
    about = prose(" ".join(inspect.cleandoc(declared.__doc__ or "").split()))
    fields = field_rows(declared)
    return "\n\n".join((title, about, table(("field", "type", "what it is"), fields)) if fields else (title, about))


def field_rows(declared: type[Any]) -> list[tuple[str, ...]]:
    """Name, type and comment of each field, in their order."""
    source = textwrap.dedent(inspect.getsource(declared))
    lines = source.splitlines()
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    rows: list[tuple[str, ...]] = []
    for node in body.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        assert isinstance(node.target, ast.Name)
        about: list[str] = []
        above = node.lineno - 2
        while lines[above].strip().startswith("#: "):
            about.insert(0, lines[above].strip()[3:])
            above -= 1
        rows.append((f"`{node.target.id}`", f"`{ast.unparse(node.annotation)}`".replace("|", "\\|"), " ".join(about)))
    return rows


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
