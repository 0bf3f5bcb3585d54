"""Data for federations: named data sets, their partition among clients, and the data of each client."""

from fedcover.data.augment import Views, random_crop_flip
from fedcover.data.catalogue import Source
from fedcover.data.devices import Device, DevicePopulation
from fedcover.data.examples import Examples, as_examples
from fedcover.data.fetch import get
from fedcover.data.inputs import Inputs
from fedcover.data.items import Items
from fedcover.data.loading import Description, cache_folder, describe, inputs_like, load, names, shape_of
from fedcover.data.partition import dirichlet, iid, shards
from fedcover.data.population import Population, from_clients, from_parts, without_small_clients
from fedcover.data.single_client import SingleClientPopulation
from fedcover.data.split import Split

__all__ = [
    "Description",
    "Device",
    "DevicePopulation",
    "Examples",
    "Inputs",
    "Items",
    "Population",
    "SingleClientPopulation",
    "Source",
    "Split",
    "Views",
    "as_examples",
    "cache_folder",
    "describe",
    "dirichlet",
    "from_clients",
    "from_parts",
    "get",
    "iid",
    "inputs_like",
    "load",
    "names",
    "random_crop_flip",
    "shape_of",
    "shards",
    "without_small_clients",
]
