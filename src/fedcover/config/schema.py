"""The settings of a run: strict keys with the paper's values as defaults, read from TOML and the command line."""

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator

from fedcover.config.choices import (
    AGGREGATION,
    COMPLEMENT,
    DATA,
    LOCAL,
    MODEL,
    POLICY,
    SAMPLING,
    SCHEDULE,
    SECTIONS,
    SERVER,
    Choice,
    Section,
    Typed,
    choose,
    choose_callbacks,
    choose_factory,
)
from fedcover.config.grid import split_axes
from fedcover.config.sections import ClaimsConfig, ScreeningConfig, StrictSection
from fedcover.config.setting_names import nearest
from fedcover.data import names
from fedcover.errors import InputError
from fedcover.models import MODELS
from fedcover.toml import flatten
from fedcover.training.losses import LOSSES
from fedcover.training.metrics import METRICS

RENAMED = {
    "weighting": "aggregation.weighting",
    "average": "aggregation.name",
    "trim": "aggregation.trim, with aggregation.name=trimmed",
}
"""Settings of earlier versions, and what replaces them."""
KEEPS = "keeps"
"""Key under which a run's config.toml records the resolved keeps of its budgets; not a setting."""


class NamedSection(StrictSection):
    """An object of a registry by name, with its own settings as further keys."""

    model_config = ConfigDict(extra="allow")
    section: ClassVar[Section[Any]]

    name: str

    @cached_property
    def choice(self) -> Choice[Any]:
        """The object with this name and its settings, checked on first access."""
        extra, declared = self.model_extra or {}, [key for key in type(self).model_fields if key != "name"]
        options = self.section.options(choose_factory(self.section, self.name)[1]) if extra else {}
        for key in extra:
            if key not in options and (near := get_close_matches(key, declared, n=1)):
                key = f"{self.section.key}.{key}"
                raise InputError(f"there is no setting '{key}'; did you mean '{self.section.key}.{near[0]}'?")
        return choose(self.section, self.name, extra)

    @property
    def own(self) -> dict[str, Any]:
        """Those of the object's own settings that were set."""
        return {key: self.choice.settings[key] for key in self.model_extra or {}}


class DataConfig(NamedSection):
    """The data set, and how it is divided among the clients; a data set of one's own has settings as further keys."""

    section = DATA
    name: str = Field("mnist", description=f"{', '.join(names())}, or FILE.py:NAME for your own")
    partition: Literal["iid", "shards", "dirichlet", "natural"] = Field(
        "iid", description="division of the data among clients; natural: that of the data set itself"
    )
    clients: int = Field(100, ge=1, description="clients in the population")
    shards_each: int = Field(2, ge=1, description="for shards: label shards per client")
    alpha: float = Field(0.5, gt=0, description="for dirichlet: concentration; smaller is more skewed")
    augment: str = Field("", description="change of inputs at every step: crop_flip, or FILE.py:NAME for your own")
    small: Literal["refuse", "skip", "merge"] = Field(
        "refuse", description="clients with one example, which a batch norm cannot train"
    )


class ModelConfig(NamedSection):
    """The model, with its own settings as further keys."""

    section = MODEL
    name: str = Field("mlp", description=f"{', '.join(MODELS)}, or FILE.py:NAME for your own")


class TaskConfig(StrictSection):
    """The loss and the metrics."""

    loss: str = Field("cross_entropy", description=f"{', '.join(LOSSES)}, or FILE.py:NAME for your own")
    metrics: list[str] = Field(
        [], description=f"{', '.join(METRICS)}, or FILE.py:NAME for your own; none: those that the targets ask for"
    )


class PolicyConfig(NamedSection):
    """The policy that plans masks, with its own settings as further keys."""

    section = POLICY
    name: str = Field("WP", description="one of `fedcover list policies`, or FILE.py:NAME for your own")


class AggregationConfig(NamedSection):
    """The rule that aggregates updates, with its own settings as further keys."""

    section = AGGREGATION
    name: str = Field("mean", description="one of `fedcover list aggregation`, or FILE.py:NAME for your own")


class ServerConfig(NamedSection):
    """The server optimizer, with its own settings as further keys."""

    section = SERVER
    name: str = Field("plain", description="one of `fedcover list server`, or FILE.py:NAME for your own")


class BudgetsConfig(StrictSection):
    """What clients can afford."""

    code: str = Field(
        "1111111111",
        description="1111223344, or 4x1,6x0.75; with a unit, amounts: 159010,9x80000. `fedcover run` without a code"
        " takes 1111223344, spread over the cohort, for a policy that prunes",
    )
    by: Literal["slot", "client"] = Field("slot", description="whether an item belongs to a cohort slot or to a client")
    unit: str = Field("fraction", description="budget unit of the code: fraction, parameters, macs, bytes or seconds")
    calibration: str = Field("", description="for seconds: file of `fedcover calibrate steps` on the clients' device")


class LocalConfig(NamedSection):
    """Local training: the optimizer, with its own settings as further keys."""

    section = LOCAL
    name: str = Field("SGD", description="one of `fedcover list local`, or FILE.py:NAME for your own recipe")


class ScheduleConfig(NamedSection):
    """The step size over rounds: a schedule, with its own settings as further keys."""

    section = SCHEDULE
    name: str = Field("constant", description="one of `fedcover list schedule`, or FILE.py:NAME for your own")


class SamplingConfig(NamedSection):
    """Which clients take part in a round, with its own settings as further keys."""

    section = SAMPLING
    name: str = Field("uniform", description="one of `fedcover list sampling`, or FILE.py:NAME for your own")


class ComplementConfig(NamedSection):
    """What clients see outside their masks, with its own settings as further keys."""

    section = COMPLEMENT
    name: str = Field(
        "zero",
        description="one of `fedcover list complement`, or FILE.py:NAME for your own; without it, frozen for policies"
        " whose clients must see the whole model",
    )


class EvaluateConfig(StrictSection):
    """When to evaluate."""

    every: int = Field(1, ge=1, description="rounds between evaluations on the test set")
    local_every: int = Field(0, ge=0, description="rounds between local evaluations; 0: only after the last round")


class FlowerConfig(StrictSection):
    """Rounds over a network: `fedcover deploy`, and engine flower-sim."""

    clients: int = Field(0, ge=0, description="clients to wait for before the first round; 0: data.clients")
    gather: float = Field(300.0, gt=0, description="seconds to wait for these clients")
    deadline: float = Field(600.0, gt=0, description="seconds per round; later replies are left out")
    deadline_factor: float = Field(0.0, ge=0, description="a client's deadline, by its median seconds; 0: one for all")
    late: Literal["drop", "next"] = Field("drop", description="replies after the deadline: drop, or count next round")
    late_weight: float = Field(0.5, gt=0, le=1, description="weight of a late reply in the next round's mean")
    end_at_coverage: int = Field(0, ge=0, description="holders of every entry at which a round ends early; 0: never")
    quorum: float = Field(0.5, gt=0, le=1, description="share of a cohort that must reply; else the round is repeated")
    tries: int = Field(3, ge=1, description="attempts at a round before the run stops; it can be resumed")
    norm: float = Field(
        10.0, gt=0, description="maximum accepted update norm, relative to the model sent, whatever the cohort does"
    )
    slow_factor: float = Field(1.0, gt=0, le=1, description="factor of a client's budget after a missed deadline")
    ray_address: str = Field(
        "", description="for flower-sim: a Ray cluster, such as 10.0.0.1:6379; if empty, a local one is started"
    )


class Config(StrictSection):
    """All settings of a run."""

    name: str = Field("", description="name of the run; built from the settings if empty")
    seed: int = Field(0, description="seed of theta_0, the partition and every draw")
    rounds: int = Field(100, ge=1, description="number of rounds")
    cohort: int = Field(10, ge=1, description="clients per round")
    engine: Literal["auto", "serial", "processes", "vectorized", "flower-sim", "flower"] = Field(
        "auto",
        description="engine that trains the clients; flower-sim: Flower on Ray; flower: recorded by"
        " `fedcover deploy run`, not for other commands",
    )
    workers: int = Field(0, ge=0, description="worker processes; 0: one per core")
    precision: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32", description="arithmetic of engine vectorized; bf16: bfloat16, with weights and averages in float32"
    )
    shrink: bool = Field(True, description="make sub-models physically smaller where whole units are pruned")
    assign: bool = Field(False, description="give patterns of equal size to clients whose labels complement each other")
    certify: bool = Field(False, description="record a certificate of the convergence theorem for every round")
    require_coverage: bool = Field(False, description="stop before a round whose cohort leaves part of the model out")
    require_robustness: int = Field(
        0, ge=0, description="malicious clients that every average must tolerate; entries with too few holders stay"
    )
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    policy: PolicyConfig = PolicyConfig()
    aggregation: AggregationConfig = AggregationConfig()
    server: ServerConfig = ServerConfig()
    budgets: BudgetsConfig = BudgetsConfig()
    local: LocalConfig = LocalConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    sampling: SamplingConfig = SamplingConfig()
    complement: ComplementConfig = ComplementConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    screening: ScreeningConfig = ScreeningConfig()
    flower: FlowerConfig = FlowerConfig()
    claims: ClaimsConfig = ClaimsConfig()
    callbacks: dict[str, Any] = Field(
        {}, description="tables such as [callbacks.early_stopping]: see `fedcover list callbacks`; name: FILE.py:NAME"
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if len(name) > 100 or not name.isprintable() or set(name) & set("/\\"):
            raise InputError("must be at most 100 printable characters without slashes")
        return name

    def complete(self) -> dict[str, Any]:
        """Return all settings as a nested dict, with the defaults of the settings of the policy and the like."""
        settings = self.model_dump()
        for key in SECTIONS:
            named: NamedSection = getattr(self, key)
            settings[key] = {"name": named.name, **named.choice.settings}
        # As in run folders of older versions, unless something else than their settings is set.
        if ":" not in self.local.name:
            settings["local"] = self.local.choice.build().settings()
        settings["model"] = {"name": self.model.name, **self.model.own}
        settings["data"] = {**self.model_dump()["data"], **self.data.own}
        # Natural clients have a number of their own.
        for key in ("augment", "small", *(("clients",) if self.data.partition == "natural" else ())):
            if key not in self.data.model_fields_set:
                del settings["data"][key]
        screened = self.engine == "flower" and self.screening.when == "deploy"
        settings["aggregation"] = {k: v for k, v in settings["aggregation"].items() if v is not None}
        for key in ("schedule", "sampling", "complement", "task", "claims", *(() if screened else ("screening",))):
            if getattr(self, key) == type(getattr(self, key))():
                del settings[key]
        if not self.require_robustness:
            del settings["require_robustness"]
        settings["callbacks"] = {
            label: {"name": choice.name, **choice.settings}
            for label, choice in choose_callbacks(self.callbacks).items()
        }
        if not settings["callbacks"]:
            del settings["callbacks"]
        return settings

    @property
    def title(self) -> str:
        """The run's name, or one built from its settings, such as ``WP-1111223344-mnist-iid-seed0``."""
        if self.name:
            return self.name
        code = self.budgets.code if len(self.budgets.code) <= 24 else f"{self.budgets.code[:20]}..."
        code = code if self.budgets.unit == "fraction" else f"{code}-{self.budgets.unit}"
        policy = self.policy.name.rpartition(":")[2]
        start = f"{policy}-{code}" if policy.lower() != "full" else policy
        if self.complement.name != "zero":
            start += f"-{self.complement.name.rpartition(':')[2]}"
        title = f"{start}-{self.data.name.rpartition(':')[2]}-{self.data.partition}-seed{self.seed}"
        return "".join(c if c.isalnum() or c in ".-" else "_" for c in title)


def read_config(path: str | Path | None = None, changes: Sequence[str] = ()) -> Config:
    """Return the configuration in a TOML file.

    Args:
        path: The file; the defaults apply if it is None.
        changes: Settings that replace those of the file, each as ``key=value``.

    Raises:
        InputError: If the file cannot be read, or a key or a value is not valid.
    """
    settings = read_raw(path, changes)
    if "search" in settings:
        raise InputError(f"[search] in {path} is for `fedcover sweep --trials N`; leave it out for one run")
    raw, axes = split_axes(settings, valid_keys())
    if axes:
        several = "; ".join(f"{key} = {', '.join(map(str, values))}" for key, values in axes.items())
        raise InputError(f"{several} makes a grid of runs; use `fedcover sweep`, or give one value")
    return check_config(raw)


def read_raw(path: str | Path | None = None, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of a TOML file and of changes as a nested dict; values of changes are ``Typed`` text."""
    raw: dict[str, Any] = {}
    if path is not None:
        try:
            raw = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise InputError(
                f"there is no config file {path}; check the path, or leave it out for the defaults"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"{path} is not readable as TOML ({error}); see `fedcover list settings`") from error
        if isinstance(budgets := raw.get("budgets"), dict):
            budgets.pop(KEEPS, None)  # recorded by a run; another run resolves its budgets again
    for change in changes:
        _apply(raw, change)
    return raw


def parse_config(text: str) -> Config:
    """Return the configuration in a TOML text, such as one received over the wire."""
    try:
        return check_config(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the settings are not valid TOML ({error}); see `fedcover list settings`") from error


def parse_client_config(text: str) -> Config:
    """Return the configuration in a TOML text, as a client needs it: without what only the server uses.

    Files of callbacks and of client sampling thus need not be on the clients.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the settings are not valid TOML ({error}); see `fedcover list settings`") from error
    return check_config({key: value for key, value in raw.items() if key not in ("callbacks", "sampling")})


def check_config(raw: dict[str, Any]) -> Config:
    """Return the configuration that a nested dict describes.

    Raises:
        InputError: If a key or a value is not valid; the message names the key and the remedy.
    """
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            if key in RENAMED:
                raise InputError(f"there is no setting '{key}'; use {RENAMED[key]}") from None
            raise InputError(f"there is no setting '{key}'{nearest(key, valid_keys())}") from None
        problem = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        raise InputError(f"setting {key} {problem}; got {first['input']!r}") from None
    config.complete()  # checks the settings of the policy and the like before anything is done
    return config


def valid_keys() -> dict[str, Any]:
    """Return every setting with its default by dotted key, without those of single policies and the like."""
    return dict(flatten(Config().model_dump()))


def _apply(raw: dict[str, Any], change: str) -> None:
    """Apply one ``key=value`` change to nested settings."""
    key, equals, text = change.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"--set takes key=value, such as --set local.lr=0.1; got '{change}'")
    section, dot, last = key.partition(".")
    table = raw.setdefault(section, {}) if dot else raw
    if section == "callbacks" and last:
        label, dot, option = last.partition(".")
        last = option or label
        table = table.setdefault(label, {}) if dot and isinstance(table, dict) else table
    elif section not in SECTIONS or last in ("", "name"):
        if key in RENAMED:
            raise InputError(f"there is no setting '{key}'; use {RENAMED[key]}")
        if key not in valid_keys():
            raise InputError(f"there is no setting '{key}'{nearest(key, valid_keys())}")
    if isinstance(table, dict):  # if not, check_config reports it
        table[last or section] = Typed(text)  # it is read once it is certain what it is for
