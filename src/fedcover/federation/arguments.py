"""The arguments of a federation: other forms that mean the same are converted, and wrong ones are named."""

import copy
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcover.aggregation import AGGREGATORS
from fedcover.aggregation.base import Aggregator
from fedcover.aggregation.screening import Screening
from fedcover.budgets import Budgets, by_slot
from fedcover.data import Examples, Population, as_examples
from fedcover.data.inputs import copy_of, map_inputs, parts_of, shapes
from fedcover.engines.base import Engine
from fedcover.engines.choose import choose_engine
from fedcover.errors import InputError, check_bool, shown
from fedcover.federation.sampling import SAMPLINGS, Sampling
from fedcover.policies.base import Policy, is_built_in
from fedcover.policies.registry import POLICIES
from fedcover.seeding import ambient, seeded, whole_seed
from fedcover.structure.batch_norm import check_batches
from fedcover.structure.calls import call_model
from fedcover.training.complements import COMPLEMENTS, Complement
from fedcover.training.recipes import OPTIMIZERS, Recipe
from fedcover.training.task import Task, check_classes

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation

KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "task": (Task, "a model, or a task: fedcover.Task(model, loss)"),
    "clients": (
        Population,
        "clients with their examples: fedcover.data.iid(data, clients=10) deals data to clients,"
        " fedcover.data.from_parts(data, parts) takes each client's indices, as a list or as a dict by name, and"
        " fedcover.data.from_clients(datasets) takes one data set per client",
    ),
    "policy": (Policy, "a policy or its name, such as fedcover.weight_pruning() or 'WP', or a function with"
               " @fedcover.policy"),
    "budgets": ((Budgets, type(None)), "budgets or a code, such as fedcover.by_slot('1247') or '10x0.5'"),
    "local": (Recipe, "a recipe or its name, such as fedcover.LocalSGD() or 'Adam'"),
    "aggregator": (Aggregator, "an aggregator or its name, such as fedcover.mean() or 'median', or a function with"
                   " @fedcover.aggregator"),
    "sampling": (
        Sampling,
        "client sampling, such as fedcover.weighted('examples'), or a function with @fedcover.sampling",
    ),
    "complement": (
        (Complement, type(None)),
        "a complement or its name, such as fedcover.Frozen() or 'frozen'",
    ),
    "screening": ((Screening, type(None)), "a screening, such as fedcover.Screening(change=3.0)"),
    "engine": (Engine, "an engine or its name, such as fedcover.Serial() or 'processes'"),
}  # fmt: skip
"""The type of each argument, and what to give in words."""
REGISTRIES = {
    "policy": POLICIES,
    "local": OPTIMIZERS,
    "aggregator": AGGREGATORS,
    "sampling": SAMPLINGS,
    "complement": COMPLEMENTS,
}
SWITCHES = ("certify", "require_coverage", "assign")


def resolve_arguments(federation: "Federation") -> None:
    """Replace names, codes and a model without a loss by what they mean; raise InputError for anything else."""
    for name, (kind, must) in KINDS.items():
        value = _meant(name, getattr(federation, name), federation.cohort)
        if not isinstance(value, kind):
            raise InputError(f"{name} must be {must}; got {shown(value)}")
        setattr(federation, name, value)
    federation.clients = federation.clients.with_examples(
        fit_inputs(federation.task.model, federation.clients.examples)
    )
    own = federation.clients.tests
    if own is not None:
        fitted = fit_targets(fit_inputs(federation.task.model, own.examples), federation.clients.examples)
        federation.clients = federation.clients.with_tests(own.with_examples(fitted))
    federation.seed = whole_seed(federation.seed)
    for name in SWITCHES:
        check_bool(name, getattr(federation, name))
    policy = federation.policy
    if federation.budgets is None and follows_budgets(policy):
        name = getattr(policy, "name", None) or str(policy).partition("(")[0]
        raise InputError(
            f"the policy {name} prunes to budgets, and there are none, so that every client would train the whole"
            f" model: give budgets, such as fedcover.by_slot('1111223344') for ten clients, or use the policy full"
        )


def check_structure(federation: "Federation") -> None:
    """Raise InputError if a batch norm cannot train a client; warn about operations that cannot be counted."""
    clients, structure = federation.clients, federation.structure
    sizes = {clients.number_of(client): clients.size(client) for client in range(len(clients))}
    check_batches(structure, sizes, federation.local.batch_size)
    if structure.uncounted:
        names = ", ".join(structure.uncounted)
        warnings.warn(f"the multiply-adds of {names} cannot be counted and are not part of MACs", stacklevel=4)


def test_examples(federation: "Federation", data: object) -> Examples | None:
    """Return a test set in the form of the training set, with at least as many classes.

    Without data it has the clients' own test sets, or there is none.

    Raises:
        InputError: If the model does not run on its inputs, or its targets are of another kind than in training.
    """
    train, own = federation.clients.examples, federation.clients.tests
    data = own.examples if data is None and own is not None else data
    if data is None:
        return None
    test = fit_targets(fit_inputs(federation.task.model, as_examples(data)), train)
    example = test.example()
    try:
        with torch.no_grad(), ambient(0, "look"):
            scores = call_model(copy.deepcopy(federation.task.model).cpu().eval(), copy_of(example))
    except Exception as error:
        raise InputError(
            f"the model cannot run on the test set: inputs of shape {shapes(example)} gave '{error}'; give inputs like"
            f" those of training, of shape {shapes(train.example())}"
        ) from error
    check_classes(test, scores, federation.task.decision)
    return replace(test, classes=max(test.classes, train.classes) if test.classes else 0)


def fit_targets(test: Examples, train: Examples) -> Examples:
    """Return a test set whose targets have the type and shape of the training set's.

    Raises:
        InputError: If they cannot be brought into that form without loss.
    """
    with seeded(0, "example"):
        ours, theirs = test.read(slice(1))[1], train.read(slice(1))[1]
    if (ours.dtype, ours.shape[1:]) == (theirs.dtype, theirs.shape[1:]) or (
        ours.dtype == theirs.dtype and ours.ndim == theirs.ndim and ours.ndim > 1
    ):
        return test  # dense targets of another size are the model's business
    labels = test.labels
    same_size = ours[0].numel() == theirs[0].numel()
    whole = labels is not None and (not labels.is_floating_point() or bool((labels == labels.round()).all()))
    if labels is None or not same_size or not (whole or theirs.is_floating_point()):
        raise InputError(
            f"the labels of the test set have the shape {tuple(ours.shape[1:])} and type {ours.dtype} for each example,"
            f" but those of training {tuple(theirs.shape[1:])} and {theirs.dtype}; give both in one form"
        )
    fitted = labels.to(theirs.dtype).reshape(len(labels), *theirs.shape[1:])
    classes = 0 if fitted.is_floating_point() else max(int(fitted.max()) + 1, test.classes)
    return replace(test, labels=fitted, classes=classes)


def follows_budgets(policy: Policy) -> bool:
    """Return whether a policy of this package prunes, and only as much as budgets ask for."""
    return is_built_in(policy) and not policy.traits().ignores_budgets


def _meant(name: str, value: Any, cohort: int) -> Any:
    """Return the object that a value of another kind stands for; the value itself if there is none."""
    if name == "task" and isinstance(value, nn.Module):
        return Task(value)
    if name == "engine" and isinstance(value, str):
        return choose_engine(value, cohort=cohort)
    if name == "budgets" and isinstance(value, np.ndarray | Tensor):
        value = value.tolist()
    if name == "budgets" and isinstance(value, str | list | tuple):
        return by_slot(value)
    if name in REGISTRIES and isinstance(value, str):
        registry: Any = REGISTRIES[name]
        return registry.find(value)[1]()
    return value


def fit_inputs(model: nn.Module, examples: Examples) -> Examples:
    """Return examples whose inputs have the type of the model's parameters; token numbers stay as they are.

    Whole numbers become floating-point only if the model does not run on them and does on these.
    """
    kinds = (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
    dtype = next(kinds, torch.float32)
    example = examples.example()
    if all(not part.is_floating_point() for part in parts_of(example).values()):
        whole = not _runs(model, example) and _runs(model, map_inputs(lambda part: part.to(dtype), example))
        return examples.cast(dtype, whole_numbers=True) if whole else examples
    if all(part.dtype == dtype or not part.is_floating_point() for part in parts_of(example).values()):
        return examples
    return examples.cast(dtype)


def _runs(model: nn.Module, inputs: Any) -> bool:
    with suppress(Exception), torch.no_grad(), ambient(0, "look"):
        call_model(copy.deepcopy(model).cpu(), copy_of(inputs))
        return True
    return False
