"""Data for federations: named data sets, ways to deal them to clients, and the clients' shares."""

from fedcover.data import partition
from fedcover.data.catalogue import Source
from fedcover.data.devices import Device, DevicePopulation
from fedcover.data.examples import Examples, as_examples
from fedcover.data.fetch import get
from fedcover.data.loading import Description, Split, cache_folder, describe, inputs_like, load, names, shape_of
from fedcover.data.population import Population, dirichlet, from_parts, iid, shards

__all__ = [
    "Description",
    "Examples",
    "Device",
    "Population",
    "DevicePopulation",
    "Source",
    "Split",
    "as_examples",
    "cache_folder",
    "describe",
    "dirichlet",
    "from_parts",
    "get",
    "iid",
    "inputs_like",
    "load",
    "names",
    "partition",
    "shape_of",
    "shards",
]
