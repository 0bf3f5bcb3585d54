"""`fedcover` whose nodes use the faulty worker of these tests."""

from fedcover.__main__ import main
from fedcover.deploy.node import worker_process

if __name__ == "__main__":
    worker_process.WORKER = "tests.endtoend.deploy.faulty_worker"
    main()
