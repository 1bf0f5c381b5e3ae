"""The data plane: request bytes between gateway, shards and replicas, over ZeroMQ."""

from infra.wire.client import PeerState, WireClient
from infra.wire.connection import Peer
from infra.wire.curve import CurveKeys
from infra.wire.messages import PROTOCOL_VERSION, Hello, Reply, Request
from infra.wire.server import BatchHandler, WireServer

__all__ = [
    "PROTOCOL_VERSION",
    "BatchHandler",
    "CurveKeys",
    "Hello",
    "Peer",
    "PeerState",
    "Reply",
    "Request",
    "WireClient",
    "WireServer",
]
