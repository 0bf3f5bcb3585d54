"""`fedcover` for the soak: nodes with a faulty worker, and a clock that $FEDCOVER_TEST_CLOCK, a file, sets ahead."""

import os
import time
from pathlib import Path

RIGHT = time.time


def shifted() -> float:
    """Return the time of a clock that may be wrong, and may change while the node runs."""
    try:
        return RIGHT() + float(Path(os.environ["FEDCOVER_TEST_CLOCK"]).read_text())
    except (OSError, ValueError):
        return RIGHT()


if __name__ == "__main__":
    time.time = shifted
    from fedcover.__main__ import main
    from fedcover.deploy.node import worker_process

    worker_process.WORKER = "tests.endtoend.deploy.faulty_worker"
    main()
