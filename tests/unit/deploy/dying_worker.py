"""A worker that dies: $FEDCOVER_TEST_DEATHS names a file with what happens to the next requests, one word each."""

import os
import sys
import time
from pathlib import Path

from fedcover.deploy.node import worker
from fedcover.deploy.wire import pack_frame


def answer(request: bytes) -> bytes:
    """Die, work without end, or reply, as the next word says."""
    path = Path(os.environ["FEDCOVER_TEST_DEATHS"])
    word, _, rest = path.read_text().partition(" ")
    path.write_text(rest)
    if word == "killed":
        os.kill(os.getpid(), 9)
    if word == "ended":
        os._exit(3)
    if word == "stuck":
        time.sleep(600)
    return pack_frame({"facts": {"pid": os.getpid()}}, {})


if __name__ == "__main__":
    worker.answer = answer
    sys.modules["fedcover.deploy.node.configured_client"] = sys  # nothing is trained: torch is not needed
    worker.main(int(sys.argv[1]), int(sys.argv[2]))
