"""All that travels between server and clients: orders one way, answers the other, both as frames without pickle."""

from fedcover.deploy.wire.frame import open_frame, pack_frame
from fedcover.deploy.wire.reply import Limits, Rejected, Sent, encode_answer, read_answer
from fedcover.deploy.wire.request import Order, decode_order, encode_order, job_of, order_of
from fedcover.deploy.wire.single_client import Own, only

__all__ = [
    "Limits",
    "Order",
    "Own",
    "Rejected",
    "Sent",
    "decode_order",
    "encode_answer",
    "encode_order",
    "job_of",
    "only",
    "open_frame",
    "order_of",
    "pack_frame",
    "read_answer",
]
