"""Runs described in TOML: strict keys, the paper's settings as defaults."""

import tomllib
from collections.abc import Hashable, Sequence
from difflib import get_close_matches
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from fedcover import data
from fedcover.budgets import Budget, Budgets, BudgetSpec
from fedcover.calibration import BudgetUnit, amounts
from fedcover.calibration.budget_units import StepsOf
from fedcover.calibration.device_budgets import budgets_of_fleet, cohort_of_fleet, num_budgets_of_fleet
from fedcover.config.policy_settings import SECTION, Choice, Typed, choose, options_of
from fedcover.data import Device, Examples, Population, names
from fedcover.engines.choose import choose_engine
from fedcover.engines.serial import Serial
from fedcover.errors import InputError, check_extra
from fedcover.federation.federation import Federation
from fedcover.federation.run_folder import read_settings
from fedcover.models import MODELS, build
from fedcover.policies.base import Policy
from fedcover.policies.registry import POLICIES
from fedcover.structure.trace import trace
from fedcover.toml import Settings, flatten
from fedcover.training.task import LocalSGD, Task

check_extra("cli", "reading settings", "pydantic")
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator  # noqa: E402


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataConfig(_Strict):
    """Which data, and how the clients share it."""

    name: str = Field("mnist", description=", ".join(names()))
    partition: Literal["iid", "shards", "dirichlet"] = Field("iid", description="how the clients share the data")
    clients: int = Field(100, ge=1, description="clients in the population")
    shards_each: int = Field(2, ge=1, description="with shards: label shards for each client")
    alpha: float = Field(0.5, gt=0, description="with dirichlet: smaller is more skewed")


class ModelConfig(_Strict):
    """Which network."""

    name: str = Field("mlp", description=", ".join(MODELS))


class PolicyConfig(_Strict):
    """How masks are made: a policy, and what that policy takes."""

    model_config = ConfigDict(extra="allow")

    name: str = Field("WP", description="one of `fedcover list policies`; or FILE.py:NAME for your own")

    @cached_property
    def choice(self) -> Choice:
        """The policy by that name with its own settings, which are checked here."""
        return choose(self.name, self.model_extra)


class BudgetsConfig(_Strict):
    """What clients can afford."""

    code: str = Field("1111111111", description="1111223344, or 4x1,6x0.75; amounts such as 159010,9x80000 in a unit")
    by: Literal["slot", "client"] = Field("slot", description="whether an item belongs to a cohort slot or to a client")
    unit: str = Field("fraction", description="what the code is in: fraction, parameters, macs, bytes or seconds")
    calibration: str = Field("", description="for seconds: what `fedcover calibrate` measured on the clients' device")


class LocalConfig(_Strict):
    """Local training."""

    epochs: int = Field(5, description="epochs over a client's data in each round")
    batch_size: int = Field(10, description="examples in a step")
    lr: float = Field(0.01, description="step size")
    momentum: float = Field(0.5, description="starts at 0 in each round")


class EvaluateConfig(_Strict):
    """When to look."""

    every: int = Field(1, ge=1, description="rounds between evaluations on the test set")
    local_every: int = Field(0, ge=0, description="rounds between local evaluations; 0: after the last round")


class FlowerConfig(_Strict):
    """Rounds over a network: `fedcover deploy`, and engine flower-sim."""

    clients: int = Field(0, ge=0, description="clients to wait for before the first round; 0: as many as data.clients")
    gather: float = Field(300.0, gt=0, description="seconds to wait for them")
    deadline: float = Field(600.0, gt=0, description="seconds a round; who has not answered by then is left out")
    quorum: float = Field(
        0.5, gt=0, le=1, description="share of a cohort that must answer; else the round is tried again"
    )
    tries: int = Field(3, ge=1, description="how often a round is tried before the run stops, to be resumed")
    norm: float = Field(10.0, gt=0, description="the largest change that is taken, as a multiple of what was sent")
    ray_address: str = Field(
        "", description="for flower-sim: a Ray cluster, such as 10.0.0.1:6379; if empty one is started, on loopback"
    )


class Config(_Strict):
    """A run, in full."""

    name: str = Field("", description="what the run is called; made from the settings if empty")
    seed: int = Field(0, description="decides theta_0, the partition and every draw")
    rounds: int = Field(100, ge=1, description="rounds to play")
    cohort: int = Field(10, ge=1, description="clients in a round")
    weighting: Literal["uniform", "examples", "labels"] = Field(
        "uniform", description="how a region's clients are weighted; labels: so that their labels are the population's"
    )
    average: Literal["mean", "trimmed", "median"] = Field(
        "mean", description="of a region; with trimmed or median a few clients that lie move it little"
    )
    trim: float = Field(0.2, ge=0, lt=0.5, description="with trimmed: share of a region's clients cut off at each end")
    engine: Literal["auto", "serial", "processes", "vectorized", "flower-sim", "flower"] = Field(
        "auto", description="what trains the clients; flower-sim: Flower on Ray"
    )
    workers: int = Field(0, ge=0, description="worker processes; 0: as many as there are cores")
    shrink: bool = Field(True, description="make sub-models physically smaller where whole units are pruned")
    assign: bool = Field(False, description="give patterns of equal size to clients whose labels complement each other")
    certify: bool = Field(False, description="write a certificate of the convergence theorem for every round")
    require_coverage: bool = Field(
        False, description="end before a round whose cohort leaves part of the model to nobody"
    )
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    policy: PolicyConfig = PolicyConfig()
    budgets: BudgetsConfig = BudgetsConfig()
    local: LocalConfig = LocalConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    flower: FlowerConfig = FlowerConfig()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if len(name) > 100 or not name.isprintable() or set(name) & set("/\\"):
            raise InputError("should be at most 100 printable characters without slashes")
        return name

    @property
    def title(self) -> str:
        """The run's name, or one made from its settings: ``WP-1111223344-mnist-iid-seed0``."""
        if self.name:
            return self.name
        code = self.budgets.code if len(self.budgets.code) <= 24 else f"{self.budgets.code[:20]}..."
        code = code if self.budgets.unit == "fraction" else f"{code}-{self.budgets.unit}"
        policy = self.policy.name.rpartition(":")[2]
        made = f"{policy}-{code}" if policy.lower() != "full" else policy
        made = f"{made}-{self.data.name}-{self.data.partition}-seed{self.seed}"
        return "".join(c if c.isalnum() or c in ".-" else "_" for c in made)

    def settings(self, federation: Federation) -> dict[str, Any]:
        """This configuration as a nested dict, in full, with what each budget came to where that had to be worked out.

        ``build`` takes that from there when the run is resumed, so that nothing that lies outside can change it.
        """
        settings = {**self.model_dump(), "name": self.title}
        settings["policy"] = {"name": self.policy.name, **self.policy.choice.settings}
        if self.budgets.unit != "fraction":
            settings["budgets"] = {**settings["budgets"], KEEPS: [budget.keep for budget in federation.budgets]}
        return settings

    def build(
        self, folder: str | None = None, keeps: Sequence[float] | None = None, devices: Sequence[Device] = ()
    ) -> tuple[Federation, Examples]:
        """The federation that this describes, and its test set.

        ``folder`` is where data sets lie, ``keeps`` what budgets in another unit than fractions came to before.
        ``devices`` are clients on devices of their own; then what they can afford counts, where they say it.
        """
        policy, currency = self.policy.choice.policy(), BudgetUnit(self.budgets.unit, self.budgets.calibration)
        split = data.load(self.data.name, folder)
        model = build(self.model.name, tuple(split.train.inputs.shape[1:]), split.train.classes, self.seed)
        clients = data.DevicePopulation(split.train, devices) if devices else self.population(split.train)
        local, by, items = LocalSGD(**self.local.model_dump()), self.budgets.by, self.items(policy)
        cohort = cohort_of_fleet(items, by, self.cohort, devices) if devices else self.cohort
        spec: BudgetSpec = self.budgets.code
        if not currency.plain and keeps is not None:
            many = num_budgets_of_fleet(items, by, cohort, devices) if devices else len(items)
            if len(keeps) != many:
                raise InputError(f"the run has {len(keeps)} keeps for {many} budgets; start anew in another folder")
            spec = [Budget(keep) for keep in keeps]
        elif not currency.plain:
            structure = trace(model, clients.examples.inputs[:2])
            steps_of = self._most_steps(clients, local)
            units = policy.bind(structure).units
            spec = currency.budgets(self.budgets.code, structure, steps_of, local.batch_size, units)
        budgets = Budgets(spec, by)
        if devices:
            code = budgets.resolve(policy.codebook)
            budgets = budgets_of_fleet(devices, code, by, items, cohort)
        if policy.ignores_budgets and not all(b.full for b in budgets.resolve(policy.codebook)):
            raise InputError(
                f"policy {self.policy.name} gives every client the whole model, but the code"
                f" {self.budgets.code} asks for less; choose another policy, such as WP, or a code of 1s"
            )
        if not policy.follows_patterns and self.assign:
            raise InputError(
                "assign does nothing with masks by design, which look at the sizes of budgets alone; leave assign out,"
                " or use a policy whose masks follow the patterns of a code, such as WP"
            )
        federation = Federation(
            task=Task(model),
            clients=clients,
            policy=policy,
            budgets=budgets,
            local=local,
            cohort=cohort,
            seed=self.seed,
            weighting=self.weighting,
            engine=Serial() if devices else choose_engine(self.engine, self.workers or None, self.shrink, cohort),
            certify=self.certify,
            assign=self.assign,
            require_coverage=self.require_coverage,
            average=self.average,
            trim=self.trim,
        )
        if federation.by == "slot":  # every cohort has these budgets
            federation.policy.check_budgets(federation.theta0, federation.budgets)
        return federation, split.test

    def bought(self, federation: Federation) -> str:
        """What budgets in another unit than fractions came to, in one line; empty if they are fractions.

        >>> few = check_config({"budgets": {"code": "2x50,9", "unit": "macs"}})
        >>> few._bought([0.5, 0.5, 0.125])
        'budgets in macs: 2 x 50 keep 0.5, 9 keeps 0.125'
        """
        return "" if self.budgets.unit == "fraction" else self._bought([budget.keep for budget in federation.budgets])

    def _bought(self, keeps: Sequence[float]) -> str:
        parts = []
        for (amount, keep), alike in groupby(zip(amounts(self.budgets.code), keeps, strict=True)):
            many = len(list(alike))
            parts.append(f"{f'{many} x ' if many > 1 else ''}{amount:g} keep{'' if many > 1 else 's'} {keep:.4g}")
        return f"budgets in {self.budgets.unit}: {', '.join(parts)}"

    def _most_steps(self, clients: Population, local: LocalSGD) -> StepsOf:
        """The most local steps of a client with a budget; whoever is drawn may come into any slot."""
        steps = [local.steps(clients.size(client)) for client in range(len(clients))]
        most = max(steps)
        return lambda place, many: most if self.budgets.by == "slot" else max(steps[place::many], default=most)

    def items(self, policy: Policy) -> tuple[Hashable, ...]:
        """What the code has, one by one: budgets, or amounts in another unit."""
        if self.budgets.unit == "fraction":
            return Budgets(self.budgets.code, self.budgets.by).resolve(policy.codebook)
        return tuple(amounts(self.budgets.code))

    def population(self, train: Examples) -> Population:
        """The clients, with their parts of the training set."""
        if self.data.partition == "iid":
            return data.iid(train, self.data.clients, seed=self.seed)
        if self.data.partition == "shards":
            return data.shards(train, self.data.clients, self.data.shards_each, seed=self.seed)
        return data.dirichlet(train, self.data.clients, self.data.alpha, seed=self.seed)


KEEPS = "keeps"
"""What a run's own settings call what its budgets came to: a record, and no setting."""


def read_config(path: str | Path | None = None, changes: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file (or the defaults), with ``key=value`` changes applied."""
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
            budgets.pop(KEEPS, None)  # a run worked it out, and another run does so anew
    for change in changes:
        _apply(raw, change)
    return check_config(raw)


def parse_config(text: str) -> Config:
    """The configuration in a TOML text, such as one that came over the wire."""
    try:
        return check_config(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the settings are no TOML ({error}); see `fedcover list settings`") from error


def recorded_keeps(settings: Settings) -> list[float] | None:
    """What the budgets of a run came to, as its own settings tell; None if they do not."""
    budgets = settings.get("budgets")
    keeps = budgets.get(KEEPS) if isinstance(budgets, dict) else None
    return keeps if isinstance(keeps, list) else None


def keeps_in(folder: Path) -> list[float] | None:
    """What the budgets of the run in a folder came to; None if there is no run, or it does not tell."""
    return recorded_keeps(read_settings(folder)) if (folder / "config.toml").exists() else None


def check_config(raw: dict[str, Any]) -> Config:
    """The configuration that a nested dict describes, or an error that names the key and the remedy."""
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise InputError(f"there is no setting '{key}'{_nearest(key)}") from None
        what = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise InputError(f"setting {key} {what}; got {first['input']!r}") from None
    config.policy.choice  # noqa: B018 - its settings are checked before anything is done
    return config


def valid_keys() -> dict[str, Any]:
    """Every setting but those of single policies with its default, by dotted key."""
    return dict(flatten(Config().model_dump()))


def describe_keys() -> list[tuple[str, Any, str]]:
    """Every setting with its default and one line of description; what policies take of their own is one row."""
    rows: list[tuple[str, Any, str]] = []
    for name, info in Config.model_fields.items():
        default = info.default
        if isinstance(default, _Strict):
            for inner, field in type(default).model_fields.items():
                rows.append((f"{name}.{inner}", field.default, field.description or ""))
            if name == SECTION:
                rows.append((f"{name}.*", None, "what that policy takes: `fedcover list policies`"))
        else:
            rows.append((name, default, info.description or ""))
    return rows


def _nearest(key: str) -> str:
    keys = list(valid_keys())
    every = [*keys, *(f"{SECTION}.{own}" for make in POLICIES.values() for own in options_of(make))]
    by_tail = [k for k in every if k.split(".")[-1] == key.split(".")[-1]]
    near = by_tail or get_close_matches(key, keys, n=1, cutoff=0.5)
    if not near:
        tails = {k.split(".")[-1]: k for k in reversed(every)}
        near = [tails[t] for t in get_close_matches(key.split(".")[-1], tails, n=1)]
    return f"; did you mean '{near[0]}'?" if near else "; see `fedcover list settings`"


def _apply(raw: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"--set takes key=value, such as --set local.lr=0.1; got '{change}'")
    section, dot, last = key.partition(".")
    value: Any = Typed(text)  # what a policy takes is known when its name is
    if section != SECTION or last in ("", "name"):
        if key not in valid_keys():
            raise InputError(f"there is no setting '{key}'{_nearest(key)}")
        value = text if isinstance(valid_keys()[key], str) else _parsed(text)
    at = raw.setdefault(section, {}) if dot else raw
    if isinstance(at, dict):  # if not, the check of the whole says so
        at[last or section] = value


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
