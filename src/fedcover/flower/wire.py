"""All that travels between server and clients: orders one way, answers the other, both as frames without pickle."""

from fedcover.flower.frame import open_frame, pack_frame
from fedcover.flower.orders import Order, decode_order, encode_order, job_of, order_of
from fedcover.flower.own import Own, only
from fedcover.flower.replies import Limits, Rejected, Sent, encode_answer, read_answer

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
