"""The messages between server and clients: requests one way, replies the other, both as frames without pickle."""

from fedcover.deploy.wire.complements import ExactValues, KeptCopy, QuantizedValues, SentComplement
from fedcover.deploy.wire.frame import open_frame, pack_frame
from fedcover.deploy.wire.reply import InvalidReplyError, Limits, PendingRequest, decode_reply, encode_reply
from fedcover.deploy.wire.request import (
    TrainRequest,
    decode_request,
    encode_request,
    frozen_in,
    job_from_request,
    request_from_job,
)

__all__ = [
    "ExactValues",
    "InvalidReplyError",
    "KeptCopy",
    "Limits",
    "PendingRequest",
    "QuantizedValues",
    "SentComplement",
    "TrainRequest",
    "decode_reply",
    "decode_request",
    "encode_reply",
    "encode_request",
    "frozen_in",
    "job_from_request",
    "open_frame",
    "pack_frame",
    "request_from_job",
]
