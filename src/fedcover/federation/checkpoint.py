"""Checkpoints: everything that resuming needs, in one file without pickle, written atomically.

A checkpoint is a safetensors file: the tensors of the state as ``FIELD/NAME``, such as ``theta/NAME``, the history as
bytes, and in its header the round, the fingerprint of the settings, the state of callbacks and a digest of all of it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover.federation.history import History
from fedcover.params import Params, on_device

FORMAT = "fedcover-checkpoint-1"
FIELDS = ("theta", "policy", "theory", "server", "clients")
"""The fields of ``State`` that hold tensors."""
DIGESTED = ("round", "fingerprint", "order", "callbacks")
"""Header fields that the digest covers in addition to the tensors."""


@dataclass(frozen=True)
class State:
    """The state of a federation between two rounds; nothing else is carried over."""

    round: int
    """Rounds played so far."""
    theta: Params
    policy: dict[str, Tensor] = field(default_factory=dict)
    theory: dict[str, Tensor] = field(default_factory=dict)
    """State of the certificates; empty unless the federation certifies its rounds."""
    server: dict[str, Tensor] = field(default_factory=dict)
    """State of the aggregator, such as the moments of a server optimizer."""
    clients: dict[str, Tensor] = field(default_factory=dict)
    """What is kept of single clients: control variates or moments; see ``federation/client_states.py``."""

    def on_device(self, device: torch.device) -> "State":
        """Return the state with the model, the certificates and the aggregator on a device."""
        theta, theory, server = (on_device(part, device) for part in (self.theta, self.theory, self.server))
        return replace(self, theta=theta, theory=theory, server=server)


class CorruptCheckpointError(InputError):
    """A checkpoint that is damaged; ``reason`` completes "... cannot be used because"."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"checkpoint {path} is corrupt: {reason}; resume the run, which continues from its newest whole checkpoint"
        )
        self.reason = reason


class Checkpoint(NamedTuple):
    """The content of a checkpoint."""

    state: State
    history: History
    fingerprint: str
    callbacks: dict[str, Any]
    """The state of the run's callbacks, and the stop that one asked for."""


def digest_of(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """Return the SHA-256 of the names, shapes, types and bits of tensors, and of texts."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    for text in texts:
        total.update(text.encode())
    return total.hexdigest()


def save(
    path: Path, state: State, history: History, fingerprint: str, callbacks: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint, atomically."""
    from safetensors.torch import save as to_bytes

    tensors = {f"{part}/{name}": tensor for part in FIELDS for name, tensor in getattr(state, part).items()}
    tensors["history"] = torch.frombuffer(bytearray(history.to_lines().encode() or b"\n"), dtype=torch.uint8)
    tensors = _separate(tensors)
    header = {"format": FORMAT, "round": str(state.round), "fingerprint": fingerprint}
    if callbacks:
        header["callbacks"] = json.dumps(callbacks)
    # safetensors sorts by name, but sums over theta go by its own order.
    header["order"] = json.dumps(list(tensors))
    header["digest"] = _digest(tensors, header)
    write_atomically(path, to_bytes(tensors, metadata=header))


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    return digest_of(tensors, *(header.get(key, "") for key in DIGESTED))


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors on the CPU that share no memory; only those that do are copied, since a state may be large."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        storage = here.untyped_storage()
        if storage.nbytes() != here.nbytes or storage.data_ptr() in seen:
            here = here.clone()
        seen.add(here.untyped_storage().data_ptr())
        separate[name] = here
    return separate


def load(path: Path) -> Checkpoint:
    """Return the content of a checkpoint.

    Raises:
        CorruptCheckpointError: If any bit is wrong.
        InputError: If the file may not be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except PermissionError as error:
        raise InputError(f"checkpoint {path} may not be read ({error.strerror}); change its permissions") from error
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpointError(path, f"it is truncated or damaged ({error})") from error
    if header.get("format") != FORMAT:
        raise CorruptCheckpointError(path, f"its format is {header.get('format')}, not {FORMAT}")
    if header.get("digest") != _digest(tensors, header):
        raise CorruptCheckpointError(path, "its digest does not match its contents")
    parts: dict[str, Params] = {part: {} for part in (*FIELDS, "history")}
    for name in json.loads(header["order"]):
        kind, _, rest = name.partition("/")
        parts[kind][rest] = tensors[name]
    history = History.from_lines(tensors["history"].numpy().tobytes().decode())
    state = State(int(header["round"]), **{part: parts[part] for part in FIELDS})
    return Checkpoint(state, history, header["fingerprint"], json.loads(header.get("callbacks", "{}")))
