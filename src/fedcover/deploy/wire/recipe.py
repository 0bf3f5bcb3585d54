"""A recipe as a field of a message: the name of its optimizer, and its settings by name."""

from dataclasses import fields
from typing import Any, get_args, get_type_hints

from fedcover.deploy.wire.fields import SAME_VERSION, take_bool, take_int, take_number
from fedcover.deploy.wire.frame import short_repr
from fedcover.errors import InputError
from fedcover.training.recipes import OPTIMIZERS, Recipe

NOT_SENT = ("schedule", "transforms")
"""Settings that are functions: the server applies schedules, and transforms cannot be sent."""


def check_sendable(recipe: Recipe) -> None:
    """Raise InputError if a recipe has settings that cannot be sent to another device."""
    if recipe.transforms:
        raise InputError(
            f"the gradient transform {recipe.transforms[0]!r} is a Python function, which is not sent to other devices;"
            f" use engine=processes, serial or vectorized"
        )
    if type(recipe) not in OPTIMIZERS.values():
        raise InputError(
            f"the recipe {type(recipe).__name__} is a class of your own, which is not sent to other devices; use"
            f" engine=processes, serial or vectorized"
        )


def encode_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a recipe of one round."""
    check_sendable(recipe)
    name = next(name for name, kind in OPTIMIZERS.items() if kind is type(recipe))
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name not in NOT_SENT}
    return {"optimizer": name, **values}


def decode_recipe(settings: object) -> Recipe:
    """Return the recipe that ``encode_recipe`` wrote; raise InputError if it is not valid."""
    if not isinstance(settings, dict):
        raise InputError(f"the recipe of a request must be its settings by name; got {short_repr(settings)}")
    settings = dict(settings)
    name = settings.pop("optimizer", None)
    kind = OPTIMIZERS.get(name) if isinstance(name, str) else None
    if not isinstance(kind, type):
        raise InputError(f"the recipe of a request has an unknown optimizer; {SAME_VERSION}")
    hints = get_type_hints(kind)
    values = {
        field.name: _take(settings, field.name, hints[field.name])
        for field in fields(kind)
        if field.name not in NOT_SENT
    }
    if settings:
        raise InputError(f"unexpected setting {short_repr(next(iter(settings)))} in a recipe; {SAME_VERSION}")
    recipe: Recipe = kind(**values)
    return recipe


def _take(settings: dict[str, Any], name: str, hint: Any) -> Any:
    """Return one setting, checked against its type."""
    kinds = get_args(hint) or (hint,)
    if type(None) in kinds and name in settings and settings[name] is None:
        return settings.pop(name)
    if bool in kinds:
        return take_bool(settings, name)
    return take_int(settings, name) if int in kinds else take_number(settings, name)
