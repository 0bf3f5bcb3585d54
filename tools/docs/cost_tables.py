"""The tables of the map of costs: for each split and resource the settings on the front."""

from functools import cache

from fedcover.calibration.cost_map import RESOURCES, CostMap, MappedSetting, load_cost_map
from fedcover.report.format import rough_percent
from fedcover_experiments.markdown import markdown_table
from fedcover_experiments.runner import SPLIT_TITLES


@cache
def _map() -> CostMap:
    return load_cost_map()


def cost_tables() -> str:
    """Return a section for each resource, with a table of the front on each split."""
    parts = []
    for resource, quantity in RESOURCES.items():
        parts.append(f"### {resource.capitalize()}: {quantity}")
        for split in _map().full:
            full = f"full FedAvg reaches {_map().full_accuracy(split):.1f} %"
            parts.append(f"{SPLIT_TITLES[split]}, where {full}:")
            parts.append(markdown_table([_row(setting, resource) for setting in _map().front(split, resource)]))
    return "\n\n".join(parts)


def _row(setting: MappedSetting, resource: str) -> dict[str, str]:
    return {
        f"{resource}, share of a full client's": rough_percent(setting.costs[resource]),
        "masks": f"`{setting.masks}`",
        "complement": f"`{setting.complement}`",
        "keep": f"{setting.keep:g}",
        "accuracy, %": f"{setting.accuracy:.1f}",
    }
