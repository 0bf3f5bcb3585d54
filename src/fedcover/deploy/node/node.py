"""The program of a node: it joins a server, passes requests to its worker process, and sends the replies."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType

from fedcover.deploy.flower.messages import ERROR, body_content, body_of, facts_content
from fedcover.deploy.node.fleet import (
    ConnectionLostError,
    Fleet,
    KeyRefusedError,
    NotActivatedError,
    RefusedRequestError,
)
from fedcover.deploy.node.worker import COPY_FOLDER
from fedcover.deploy.node.worker_process import WorkerProcess
from fedcover.deploy.processes.flower_app import APP_ID
from fedcover.deploy.text import one_line
from fedcover.errors import FedcoverError

BUSY_POLL, IDLE_POLL = 0.25, 2.0
"""Seconds between polls for messages: soon after a message, and after a minute without one."""
BUSY_SECONDS = 60.0
REVOKED_SECONDS = 4.0
"""Seconds for which a server must refuse a node's key before the node ends: a file of keys may just be replaced."""
RETRY = 1.0
"""Seconds between attempts to reach the server."""

Log = Callable[..., None]
"""Writes an event: its name, and what it says as keyword arguments."""


class Node:
    """A node that serves one client.

    The node runs only the fedcover that is installed here, never code that comes with a run. It opens no port.

    Args:
        fleet: The connection to the server.
        config: The node's configuration: which client it is, where its data are, and what it can afford.
        worker: The process that trains.
        log: Called with events.
        patience: Seconds without a connection to the server after which ``run`` gives up.
    """

    def __init__(
        self, fleet: Fleet, config: Mapping[str, Any], worker: WorkerProcess, log: Log, patience: float = 600.0
    ) -> None:
        self._fleet, self._config, self._worker, self._log, self._patience = fleet, dict(config), worker, log, patience
        self._runs: dict[int, dict[str, Any]] = {}
        self._last_message = time.monotonic()

    def join(self, seconds: float) -> int:
        """Join the server and return the node's id; wait so long for the key to be registered.

        Raises:
            FedcoverError: If the server does not accept the node.
        """
        until, reason = time.monotonic() + seconds, ""
        while True:
            try:
                node = self._fleet.join()
                self._log(
                    "joined", node=str(node), server=self._fleet.address, clock_ahead=round(self._fleet.clock.ahead, 1)
                )
                return node
            except (NotActivatedError, ConnectionLostError, KeyRefusedError) as error:
                if time.monotonic() > until:
                    raise
                if str(error) != reason:
                    reason = str(error)
                    self._log("waiting", reason=f"{reason}; it is tried again for {seconds:.0f} s")
                time.sleep(RETRY)

    def run(self) -> None:
        """Serve requests until the server refuses the node, or does not respond for too long.

        Raises:
            FedcoverError: The reason; it never returns.
        """
        last_response, problem = time.monotonic(), ""
        while True:
            try:
                served = self._serve_next()
                last_response, problem = time.monotonic(), ""
                if not served:
                    busy = last_response - self._last_message < BUSY_SECONDS
                    time.sleep(BUSY_POLL if busy else IDLE_POLL)
            except RefusedRequestError as error:
                self._log("refused", reason=str(error))
                last_response = time.monotonic()
                self._rejoin()
            except (ConnectionLostError, KeyRefusedError) as error:
                if type(error).__name__ != problem:
                    self._log("lost", reason=str(error))
                problem, waited = type(error).__name__, time.monotonic() - last_response
                if isinstance(error, KeyRefusedError) and waited > REVOKED_SECONDS:
                    raise
                if waited > self._patience:
                    raise FedcoverError(
                        f"the server at {self._fleet.address} was unreachable for {self._patience:.0f} s; start it,"
                        f" then start this node"
                    ) from None
                self._rejoin()

    def _rejoin(self) -> None:
        """Join again after a moment, since a server that was restarted may not have this node online."""
        time.sleep(RETRY)
        with suppress(NotActivatedError, ConnectionLostError, RefusedRequestError, KeyRefusedError):
            self._fleet.join()

    def _serve_next(self) -> bool:
        """Serve the next message, and return whether there was one."""
        start = time.monotonic()
        message = self._fleet.pull()
        if message is None:
            return False
        pulled = self._last_message = time.monotonic()
        reply, outcome = self._reply(message)
        worked = time.monotonic()
        self._fleet.push(reply, message, worked - pulled)
        self._last_message = time.monotonic()
        self._log(
            "reply",
            run=str(message.metadata.run_id),
            round=message.metadata.group_id,
            kind=message.metadata.message_type,
            seconds=round(worked - pulled, 3),
            seconds_pull=round(pulled - start, 3),
            seconds_push=round(self._last_message - worked, 3),
            **outcome,
        )
        return True

    def _reply(self, message: Message) -> tuple[Message, dict[str, Any]]:
        """Return the reply to a message, which may be the reason of a failure, and what to log of it."""
        try:
            run, seconds = self._run_config(message.metadata.run_id), self._fleet.seconds_left(message)
            if message.metadata.message_type == MessageType.QUERY:
                facts = self._worker.facts(run, self._config, seconds)
            else:
                result = self._worker.train(run, self._config, body_of(message), seconds)
                if isinstance(result, bytes):
                    return Message(body_content(result), reply_to=message), {"bytes": len(result)}
                facts = result
        except (FedcoverError, ValueError) as error:
            if isinstance(error, ConnectionLostError | KeyRefusedError):
                raise
            facts = {ERROR: one_line(error)}
        outcome = {"error": facts[ERROR]} if ERROR in facts else {}
        return Message(facts_content(facts), reply_to=message), outcome

    def _run_config(self, run: int) -> dict[str, Any]:
        """Return the configuration of a run, without folders on the server."""
        if run not in self._runs:
            config = self._fleet.run_config(run)
            if config["app"] != APP_ID:
                raise FedcoverError("this node serves only runs of `fedcover deploy run`, which bring no code")
            self._runs = {run: {key: str(config.get(key, "")) for key in ("settings", "files")}}
        return self._runs[run]


def serve(
    fleet: Fleet, config: Mapping[str, Any], folder: Path, log: Log, wait: float, patience: float,
    on_joined: Callable[[int], None],
) -> None:  # fmt: skip
    """Run a node until it must end; the worker process ends with it.

    Args:
        fleet: The connection to the server; it is closed.
        config: The node's configuration.
        folder: The folder for the log of the worker process, and for the node's copy of the model.
        log: Called with events.
        wait: Seconds to wait for the node's key to be registered.
        patience: Seconds without a connection after which the node gives up.
        on_joined: Called with the node's id once it has joined.

    Raises:
        FedcoverError: Why the node ended.
    """

    def on_death(reason: str) -> None:
        log("worker died", reason=f"the process that trains ended {reason}")

    with closing(fleet), closing(WorkerProcess(folder / "worker.log", on_death)) as worker:
        worker.start()
        node = Node(fleet, {**config, COPY_FOLDER: str(folder)}, worker, log, patience)
        on_joined(node.join(wait))
        node.run()
