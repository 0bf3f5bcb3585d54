"""The errors and warnings that users see: one sentence that names the thing, the value and the remedy."""


class FedcoverError(Exception):
    """Anything fedcover itself reports; ``str(error)`` is fit to show to a user."""


class InputError(FedcoverError, ValueError):
    """What the caller gave cannot be used: a setting, a file, a mask, a folder."""


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


def check_whole(name: str, value: object, least: int) -> None:
    """Nothing, or an error if the value is not a whole number of ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of {least} or more; got {value!r}")


def check_number(name: str, value: object, low: float, high: float, must: str) -> None:
    """Nothing, or an error if the value is not a number with low < value < high; ``must`` says it in words."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise InputError(f"{name} must be {must}; got {value!r}")
