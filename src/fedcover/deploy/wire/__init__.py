"""All that travels between server and clients: orders one way, answers the other, both as frames without pickle."""

from fedcover.deploy.wire.frame import open_frame, pack_frame
from fedcover.deploy.wire.reply import Limits, Rejected, Sent, encode_reply, read_answer
from fedcover.deploy.wire.request import TrainRequest, decode_request, encode_request, job_of, order_of
from fedcover.deploy.wire.single_client import Own, only

__all__ = [
    "Limits",
    "TrainRequest",
    "Own",
    "Rejected",
    "Sent",
    "decode_request",
    "encode_reply",
    "encode_request",
    "job_of",
    "only",
    "open_frame",
    "order_of",
    "pack_frame",
    "read_answer",
]
