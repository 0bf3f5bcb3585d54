"""The process in which a node trains: it reads requests from one pipe and writes replies to another.

Run as ``python -m fedcover.deploy.node.worker READ WRITE``, with the numbers of two open pipes. A request is a frame
with the run's and the node's configuration and what to do: report facts, or train. The process loads torch and
the data once and serves all rounds. It ends when its parent closes the pipe or is killed.
"""

import os
import signal
import struct
import sys
from typing import BinaryIO

from fedcover.deploy.processes.supervisor import PR_SET_PDEATHSIG, prctl
from fedcover.deploy.text import one_line
from fedcover.deploy.wire import open_frame, pack_frame

LENGTH = struct.Struct("<Q")
MAX_BYTES = 1 << 40
COPY_FOLDER = "copy-folder"
"""The key of a node's configuration with the folder in which it keeps its copy of the model."""


def write_frame(pipe: BinaryIO, frame: bytes) -> None:
    """Write a frame with its length."""
    pipe.write(LENGTH.pack(len(frame)))
    pipe.write(frame)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> bytes | None:
    """Return the next frame; None at the end of the pipe."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    frame = pipe.read(size)
    return frame if len(frame) == size else None


def answer(request: bytes) -> bytes:
    """Return the reply to a request, as a frame: with facts, with a body, or with the reason of a failure."""
    from fedcover.deploy.node.configured_client import report_facts, train

    head, parts = open_frame(request, MAX_BYTES)
    try:
        if head["kind"] == "train":
            return pack_frame({}, {"body": train(head["run"], head["node"], bytes(parts["body"]))})
        return pack_frame({"facts": report_facts(head["run"], head["node"])}, {})
    except Exception as error:
        return pack_frame({"error": one_line(f"{type(error).__name__}: {error}")}, {})


def main(read: int, write: int) -> None:
    """Serve requests until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the pipe
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    with os.fdopen(read, "rb") as requests, os.fdopen(write, "wb") as replies:
        import fedcover.deploy.node.configured_client  # noqa: F401  # load torch before the first request

        while (request := read_frame(requests)) is not None:
            write_frame(replies, answer(request))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
