"""Evaluate every client at the end of a run."""

from dataclasses import dataclass

from fedcover._files import write_atomically
from fedcover.errors import InputError, check_whole
from fedcover.federation.callbacks.base import CALLBACKS, Callback, RunView

FILE = "evaluation.json"
"""The file of the tables in a run folder."""


@CALLBACKS.register("evaluate_clients")
@dataclass
class EvaluateClients(Callback):
    """Write the scores of every client, level and class to ``evaluation.json`` at the end of the run.

    Args:
        personalise: Epochs of fine-tuning on each client's own examples before a second evaluation; 0 for none.
    """

    personalise: int = 0

    def __post_init__(self) -> None:
        check_whole("personalise", self.personalise, 0)

    def on_start(self, run: RunView) -> None:
        """Raise InputError without a run folder or a test set."""
        if run.folder is None or run.test is None:
            raise InputError("EvaluateClients needs a run folder and a test set; pass out and evaluate_on")

    def on_end(self, run: RunView) -> None:
        """Evaluate the clients and write the tables."""
        from fedcover.federation.client_evaluation import evaluate_clients

        assert run.folder is not None
        tables = evaluate_clients(run.federation, run.state, run.test, self.personalise)
        write_atomically(run.folder / FILE, tables.to_json())
