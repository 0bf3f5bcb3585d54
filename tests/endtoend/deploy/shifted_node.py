"""`fedcover` on a machine whose clock is wrong: $FEDCOVER_TEST_CLOCK is by how many seconds it is ahead."""

import os
import time

RIGHT = time.time

if __name__ == "__main__":
    time.time = lambda: RIGHT() + float(os.environ["FEDCOVER_TEST_CLOCK"])
    import flwr.app.message.message as messages

    from fedcover.__main__ import main

    right_now = messages.now
    messages.now = lambda: type(right_now()).fromtimestamp(time.time(), right_now().tzinfo)
    main()
