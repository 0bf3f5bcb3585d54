"""The errors and warnings that users see: one sentence that names the thing, the value and the remedy."""

import importlib.util

PACKAGES = {"PIL": "pillow", "torch_pruning": "torch-pruning"}
"""Names under which pip knows modules that are imported under another name."""


class FedcoverError(Exception):
    """Anything fedcover itself reports; ``str(error)`` is fit to show to a user."""


class InputError(FedcoverError, ValueError):
    """What the caller gave cannot be used: a setting, a file, a mask, a folder."""


class MissingExtraError(InputError):
    """A package that only some features need is not installed; the message ends with the pip command."""


class CoverageWarning(UserWarning):
    """A round's masks left part of the model to nobody; a run says so once."""


class WholeLayersWarning(UserWarning):
    """A policy of units leaves layers whole, since their units cannot be followed; a run says so once."""


class DesignWarning(UserWarning):
    """A cohort's budgets do not reach the coverage that was asked for; a run says so once."""


class StepSizeWarning(UserWarning):
    """The step size of a certified run is larger than the theorem allows; a run says so once."""


class ClientError(FedcoverError):
    """A client failed; the message names the client, the round and the stage."""


def check_extra(extra: str, feature: str, *modules: str) -> None:
    """Raise MissingExtraError unless all these modules of an optional extra are installed; import none of them.

    >>> check_extra("report", "a report", "no_such_module")
    Traceback (most recent call last):
    fedcover.errors.MissingExtraError: a report needs no_such_module; install it with: pip install 'fedcover[report]'
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            package = PACKAGES.get(module, module)
            raise MissingExtraError(f"{feature} needs {package}; install it with: pip install 'fedcover[{extra}]'")


def check_whole(name: str, value: object, least: int) -> None:
    """Nothing, or an error if the value is not a whole number of ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of {least} or more; got {value!r}")


def check_number(name: str, value: object, low: float, high: float, must: str) -> None:
    """Nothing, or an error if the value is not a number with low < value < high; ``must`` says it in words."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise InputError(f"{name} must be {must}; got {value!r}")
