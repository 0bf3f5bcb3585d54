"""Descriptions of all settings, for `fedcover list settings` and the documentation."""

from typing import Any

from fedcover.config.schema import Config, NamedSection
from fedcover.config.sections import StrictSection


def describe_keys() -> list[tuple[str, Any, str]]:
    """Return every setting with its default and a line of description; ``policy.*`` and the like are one row each."""
    rows: list[tuple[str, Any, str]] = []
    for name, info in Config.model_fields.items():
        default = info.default
        if isinstance(default, StrictSection):
            for inner, field in type(default).model_fields.items():
                table = isinstance(field.default, dict)
                key = f"{name}.{inner}.*" if table else f"{name}.{inner}"
                rows.append((key, None if table else field.default, field.description or ""))
            if isinstance(default, NamedSection):
                topic = {"policy": "policies", "model": "models"}.get(name, name)
                rows.append(
                    (f"{name}.*", None, f"settings of that {default.section.noun}: see `fedcover list {topic}`")
                )
        else:
            whole = isinstance(default, dict)
            rows.append((f"{name}.*" if whole else name, None if whole else default, info.description or ""))
    return rows
