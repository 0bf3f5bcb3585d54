"""The parent's side of a worker process: it is started when needed, and again after it has died."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedcover.deploy.node import worker
from fedcover.deploy.node.worker import LENGTH, MAX_BYTES
from fedcover.deploy.wire import open_frame, pack_frame
from fedcover.errors import FedcoverError

WORKER = worker.__name__
"""The module that the process runs."""
ATTEMPTS = 2
"""How often a request is tried if the worker process dies."""
END_SECONDS = 5.0
MAX_WRITE, MAX_READ = 1 << 16, 1 << 20
"""Bytes that are written to a pipe, or read from it, at once."""


class WorkerDiedError(FedcoverError):
    """The worker process died while it worked on a request."""


class WorkerProcess:
    """A process that trains for a node; it stays, so that torch, data and traced steps are loaded once.

    Close it, or use it with ``contextlib.closing``.

    Args:
        log: The file to which its output is appended.
        on_death: Called with how it ended, each time that it dies while it works on a request.
    """

    def __init__(self, log: Path, on_death: Callable[[str], None] = lambda reason: None) -> None:
        self._log, self._on_death = log, on_death
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None if it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process unless it runs; it loads torch meanwhile."""
        if self.pid is not None:
            return
        self._close_pipes()
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            request_read, request_write, reply_read, reply_write = pipes
            with open(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", WORKER, str(request_read), str(reply_write)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(request_read, reply_write),
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            for pipe in pipes:
                os.close(pipe)
            raise WorkerDiedError(f"its process could not be started ({error.strerror})") from error
        os.close(request_read)
        os.close(reply_write)
        os.set_blocking(request_write, False)  # a process that is stopped does not read
        self._requests, self._replies = os.fdopen(request_write, "wb"), os.fdopen(reply_read, "rb")

    def facts(self, run: Mapping[str, Any], node: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return what the node reports of its client, or the error; give up after so many seconds."""
        head, _ = self._ask({"kind": "facts", "run": dict(run), "node": dict(node)}, {}, seconds)
        return {"error": head["error"]} if "error" in head else dict(head["facts"])

    def train(
        self, run: Mapping[str, Any], node: Mapping[str, Any], body: bytes, seconds: float
    ) -> bytes | dict[str, Any]:
        """Return the reply to a request of the server, or the facts of an error; give up after so many seconds."""
        head, parts = self._ask({"kind": "train", "run": dict(run), "node": dict(node)}, {"body": body}, seconds)
        return {"error": head["error"]} if "error" in head else bytes(parts["body"])

    def _ask(
        self, head: dict[str, Any], parts: dict[str, bytes], seconds: float
    ) -> tuple[dict[str, Any], dict[str, memoryview]]:
        """Send a request and return the reply; start another process if this one dies, and try again.

        Raises:
            WorkerDiedError: If it dies twice, or works longer than ``seconds``, after which nobody waits for its reply.
        """
        request, until = pack_frame(head, parts), time.monotonic() + seconds
        for attempt in range(ATTEMPTS):
            self.start()
            try:
                _send(self._requests.fileno(), request, until)
                reply = _receive(self._replies.fileno(), until)
            except TimeoutError:
                self.close()
                raise WorkerDiedError(f"its process was still working after {seconds:.0f} s and was ended") from None
            except OSError:
                reply = None
            if reply is not None:
                return open_frame(reply, MAX_BYTES)
            reason = how_it_ended(self._end())
            self._on_death(reason)
            if attempt + 1 == ATTEMPTS:
                raise WorkerDiedError(f"its process ended {reason}, {ATTEMPTS} times")
        raise AssertionError("not reached")

    def _end(self) -> int:
        """End the process and return its exit code."""
        self._close_pipes()
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            return process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _close_pipes(self) -> None:
        for name in ("_requests", "_replies"):
            if (pipe := self.__dict__.pop(name, None)) is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def close(self) -> None:
        """End the process, at once if it is working."""
        if self.pid is not None and self._process is not None:
            self._process.terminate()
        self._end()


def _send(pipe: int, frame: bytes, until: float) -> None:
    """Write a frame with its length to a pipe; raise TimeoutError if it is not read until then."""
    for data in (memoryview(LENGTH.pack(len(frame))), memoryview(frame)):
        while data:
            _wait([], [pipe], until)
            data = data[os.write(pipe, data[:MAX_WRITE]) :]


def _receive(pipe: int, until: float) -> bytes | None:
    """Return the next frame of a pipe, None at its end; raise TimeoutError if it is not complete until then."""
    head = _read(pipe, LENGTH.size, until)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    frame = _read(pipe, size, until)
    return frame if len(frame) == size else None


def _read(pipe: int, size: int, until: float) -> bytes:
    """Return as many bytes of a pipe, or fewer at its end."""
    data = bytearray()
    while len(data) < size:
        _wait([pipe], [], until)
        part = os.read(pipe, min(MAX_READ, size - len(data)))
        if not part:
            break
        data += part
    return bytes(data)


def _wait(readers: list[int], writers: list[int], until: float) -> None:
    """Wait until a pipe can be read or written; raise TimeoutError at a moment of the monotonic clock."""
    if not any(select.select(readers, writers, [], max(0.0, until - time.monotonic()))):
        raise TimeoutError


def how_it_ended(code: int) -> str:
    """Return how a process ended, by its exit code.

    >>> how_it_ended(-9), how_it_ended(1)
    ('by signal SIGKILL (is there enough memory?)', 'with code 1')
    """
    if code >= 0:
        return f"with code {code}"
    name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else str(-code)
    return f"by signal {name}" + (" (is there enough memory?)" if name == "SIGKILL" else "")
