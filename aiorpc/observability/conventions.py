"""Names of attributes: OpenTelemetry's conventions for RPC, and those of aiorpc for what the conventions do not have.

The names are written here because the Python package of the conventions is behind their text.
"""

from __future__ import annotations

from ..protocol.identity import legible

#: The version of the conventions that the names are from.
VERSION = "1.45.0"
SCHEMA_URL = f"https://opentelemetry.io/schemas/{VERSION}"

RPC_SYSTEM_NAME = "rpc.system.name"
RPC_METHOD = "rpc.method"
#: The method as its caller names it, where `rpc.method` is `OTHER`.
RPC_METHOD_ORIGINAL = "rpc.method_original"
#: The outcome of a call that has ended without a value.
RPC_STATUS_CODE = "rpc.status_code"
ERROR_TYPE = "error.type"
#: Where the worker at the other end listens: the path of its unix socket, or an address with a port.
NETWORK_PEER_ADDRESS = "network.peer.address"
NETWORK_PEER_PORT = "network.peer.port"

#: The name of this worker, in the scope of its spans: several workers may share a process.
WORKER = "aiorpc.worker"
#: The name of the worker at the other end.
PEER = "aiorpc.peer"
#: The name of a queue, or of a published value.
NAME = "aiorpc.name"
#: Events of a span: another try follows; a member of a group has failed.
RETRY = "aiorpc.retry"
MEMBER_FAILED = "aiorpc.member_failed"

#: The value of `rpc.system.name`.
SYSTEM = "aiorpc"
#: The value of `rpc.method` for a function that is not known.
OTHER = "_OTHER"


def method_name(function: str) -> str:
    """`rpc.method` of a function that aiorpc names ``module:name``."""
    return legible(function.replace(":", "/"))
