"""The data, the model and the task of a configuration: named ones, or those of the user's own files."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from fedcover import data
from fedcover.config.choices import MODEL, choose
from fedcover.config.python_file import load_function
from fedcover.config.schema import Config
from fedcover.data import Examples, Inputs, Population, Split, as_examples
from fedcover.data.augment import AUGMENTATIONS
from fedcover.data.examples import Augmentation
from fedcover.data.inputs import map_inputs
from fedcover.data.tensors import as_input
from fedcover.errors import InputError
from fedcover.models import INPUT_SHAPES, default_model
from fedcover.seeding import ambient, seeded
from fedcover.training.losses import LOSSES
from fedcover.training.metrics import METRICS
from fedcover.training.task import Task

FORMS = "return (train, test), where train is data for fedcover.data.as_examples, or a Population"

Load = Callable[[str], Split]
"""A function that loads a named data set."""


class LoadedData(NamedTuple):
    """The data of a run."""

    train: Examples
    test: Examples | None
    clients: Population | None
    """The clients, if the data set itself divides the examples among them."""
    named: bool = False
    """Whether the data set is a named one, which other partitions may divide too."""


def load_data(config: Config, folder: str | None = None, load: Load | None = None) -> LoadedData:
    """Return the data that a configuration names.

    Args:
        config: The settings.
        folder: Folder with the data sets; the usual places if None.
        load: Loads a named data set, for runs that share one in memory.

    Raises:
        InputError: If there is no such data, or it is not of a form that can be used.
    """
    if ":" not in config.data.name:
        split = load(config.data.name) if load else data.load(config.data.name, folder)
        return _augmented(config, LoadedData(split.train, split.test, split.clients, named=True))
    name = config.data.name
    with seeded(config.seed, "data", name):
        product = config.data.choice.build(folder=folder)
    if isinstance(product, Mapping):  # as Hugging Face's DatasetDict
        product = (product.get("train"), product.get("test", product.get("validation")))
    if isinstance(product, Split):
        train, test = _named(product.train, name), _named(product.test, name)
        return _augmented(config, LoadedData(train, test, product.clients, named=True))
    if isinstance(product, Population):
        product = (product, None)
    if not isinstance(product, tuple | list) or len(product) != 2 or product[0] is None:
        raise InputError(f"data set {name} must {FORMS}; it returned a value of type {type(product).__name__}")
    train, test = product
    tested = None if test is None else _named(test, name)
    if isinstance(train, Population):
        return _augmented(config, LoadedData(train.examples, tested, train))
    return _augmented(config, LoadedData(_named(train, name), tested, None))


def population(config: Config, loaded: LoadedData) -> Population:
    """Return the clients with their parts of the training set."""
    settings, train = config.data, loaded.train
    natural = settings.partition == "natural"
    if loaded.clients is not None and not natural and not loaded.named:
        raise InputError(f"{settings.name} has clients of its own; set data.partition=natural")
    if loaded.clients is not None and natural:
        clients = loaded.clients
    elif natural:
        raise InputError(f"{settings.name} has no clients of its own; use the partition iid, shards or dirichlet")
    elif settings.partition == "iid":
        clients = data.iid(train, settings.clients, seed=config.seed)
    elif settings.partition == "shards":
        clients = data.shards(train, settings.clients, settings.shards_each, seed=config.seed)
    else:
        clients = data.dirichlet(train, settings.clients, settings.alpha, seed=config.seed)
    whole = len(clients)
    if settings.small != "refuse":
        batch_size = int(config.local.choice.settings.get("batch_size", 10))
        clients = data.without_small_clients(clients, batch_size, settings.small)
    # Run folders have the number of those that are left.
    if natural and "clients" in settings.model_fields_set and settings.clients not in (whole, len(clients)):
        raise InputError(f"data.clients must be left out: {settings.name} has {whole} clients")
    return clients


def build_task(config: Config, train: Examples) -> Task:
    """Return the model with its loss and metrics."""
    _check_positions(config.model.name, train)
    metrics = [named_or_own(name, "metric", METRICS) for name in config.task.metrics]
    return Task(build_model(config, train), named_or_own(config.task.loss, "loss", LOSSES), metrics or None)


def build_model(config: Config, train: Examples) -> nn.Module:
    """Return the model, whose initial parameters depend only on the seed."""
    choice = config.model.choice
    arguments: dict[str, Any] = {"classes": train.classes}
    if ":" not in choice.name or isinstance(train.example(), Tensor):
        arguments["shape"] = train.input_shape
    with ambient(config.seed, "model", choice.name.rpartition(":")[2]):
        model = choice.build(**arguments)
    return model_of(model, choice.name)[0]


def model_of(product: Any, name: str) -> tuple[nn.Module, Inputs | None]:
    """Return the model of a factory, and the example of inputs if it returned (model, example)."""
    model, example = product if isinstance(product, tuple) and len(product) == 2 else (product, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"model {name} must be a torch.nn.Module, or (model, inputs); got {type(model).__name__}")
    return model, example


def model_and_example(name: str, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """Return a model and an example of its inputs, without data.

    Args:
        name: A named model, or ``FILE.py:NAME``, whose factory then returns (model, inputs).
        seed: Seed of the initial parameters.

    Raises:
        InputError: If there is no such model, or a factory returns no example of inputs.
    """
    if ":" not in name:
        return default_model(name, seed)
    with ambient(seed, "model", name.rpartition(":")[2]):
        model, example = model_of(choose(MODEL, name).build(), name)
    if example is None:
        raise InputError(f"model {name} must return (model, inputs) here, with an example of its inputs")
    return model, map_inputs(as_input, example)


def named_or_own(name: str, noun: str, registry: Any) -> Any:
    """Return the function of a registry, or that of ``FILE.py:NAME``."""
    return load_function(name, noun) if ":" in name else registry.find(name)[1]


def _check_positions(model: str, train: Examples) -> None:
    """Raise InputError for a named model of images on data with a class for every position."""
    labels = train.class_labels() if train.has_classes else None
    positions = labels is not None and labels.shape[1:].numel() > 1 and len(train.input_shape) == 1
    if positions and len(INPUT_SHAPES.get(model, ())) > 1:
        texts = " or ".join(name for name, shape in INPUT_SHAPES.items() if len(shape) == 1)
        raise InputError(
            f"model {model} predicts one class for an example, and {train.name} has one for every position; set"
            f" model.name to {texts}, or to your own"
        )


def _named(examples: object, name: str) -> Examples:
    try:
        converted = as_examples(examples)
    except InputError as error:
        raise InputError(f"data set {name}: {error}") from error
    return replace(converted, name=name.rpartition(":")[2], provenance=f"from {name}")


def _augmented(config: Config, loaded: LoadedData) -> LoadedData:
    if not config.data.augment:
        return loaded
    name = config.data.augment
    augment: Augmentation = named_or_own(name, "augmentation", AUGMENTATIONS)
    if ":" not in name:
        augment = AUGMENTATIONS.find(name)[1]()
    clients = loaded.clients.augmented(augment) if loaded.clients is not None else None
    return loaded._replace(train=loaded.train.augmented(augment), clients=clients)
