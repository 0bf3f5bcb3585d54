"""The errors and warnings that users see: one sentence with the subject, the value and the remedy."""

import importlib.util
import inspect
from collections.abc import Callable

PACKAGES = {"PIL": "pillow", "mlflow": "mlflow-skinny"}
"""Names under which pip knows modules that are imported under another name."""


class FedcoverError(Exception):
    """Base class of the errors that fedcover raises on purpose; ``str(error)`` is fit to show to a user."""


class InputError(FedcoverError, ValueError):
    """An argument, setting, file, mask or folder that cannot be used."""


class FolderError(InputError):
    """A file that cannot be written, or a folder in which a run cannot be kept: it is in use, or holds another run."""


class MissingExtraError(InputError):
    """A package that only some features need is not installed; the message ends with the pip command."""


class CoverageWarning(UserWarning):
    """Issued once a run: the masks of a round leave part of the model to no client."""


class WholeLayersWarning(UserWarning):
    """Issued once a run: layers stay whole, so that clients keep another share of the model than budgets ask for."""


class BudgetWarning(UserWarning):
    """Issued once a run: a policy of your own keeps more of the model than budgets allow, or there are no budgets."""


class DesignWarning(UserWarning):
    """Issued once a run: the budgets of a cohort do not reach the requested coverage."""


class StepSizeWarning(UserWarning):
    """Issued once a run: the step size of a certified run is larger than the theorem allows."""


class SamplingWarning(UserWarning):
    """Issued once a run: a round has fewer clients than the cohort."""


class CallbackStateWarning(UserWarning):
    """Issued if a run is resumed with a callback whose stored state is of another metric: it starts again."""


class CheckpointWarning(UserWarning):
    """Issued if a run is resumed whose newest checkpoint, or best model, is damaged: it continues without it."""


class StoppedWarning(UserWarning):
    """Issued if a run is resumed that a callback has stopped: it has ended, and plays no further round."""


class ClientError(FedcoverError):
    """A client's failure; the message names the client, the round and the stage."""


class DivergedError(ClientError):
    """All clients of a round diverged: none of them has trained values that are finite.

    Args:
        message: The message.
        round: The number of the round, from 1.
    """

    def __init__(self, message: str, round: int) -> None:
        super().__init__(message, round)
        self.round = round

    def __str__(self) -> str:
        """Return the message."""
        return str(self.args[0])


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
    """Raise InputError unless the value is a whole number of ``least`` or more.

    Args:
        name: Name of the parameter, for the message.
        value: Value to check; a bool is not a whole number.
        least: Smallest valid value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of {least} or more; got {value!r}")


def check_number(name: str, value: object, low: float, high: float, must: str) -> None:
    """Raise InputError unless the value is a number with ``low < value < high``.

    Args:
        name: Name of the parameter, for the message.
        value: Value to check; a bool is not a number.
        low: Exclusive lower bound.
        high: Exclusive upper bound.
        must: The requirement in words, which completes "``name`` must be ...".
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise InputError(f"{name} must be {must}; got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Raise InputError unless the value is True or False; text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False; got {shown(value)}")


def check_arguments(function: object, names: tuple[str, ...], what: str) -> None:
    """Raise InputError unless a value is a function that can be called with these positional arguments.

    >>> check_arguments(lambda theta: {}, ("theta", "client"), "a mask's function")
    Traceback (most recent call last):
    fedcover.errors.InputError: a mask's function takes (theta, client); got a function of (theta)
    """
    takes = f"{what} takes ({', '.join(names)})"
    if not callable(function):
        raise InputError(f"{takes}; got {shown(function)}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # as of some functions in C
        return
    try:
        signature.bind(*names)
    except TypeError:
        raise InputError(f"{takes}; got a function of {signature}") from None


def shown(value: object) -> str:
    """Return an argument of the wrong kind in a few words.

    >>> shown("Adam"), shown(InputError), shown(shown), shown([1])
    ("'Adam'", 'InputError itself, which must be called', "the function 'shown'", 'a value of type list')
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if callable(value) and (name := getattr(value, "__name__", None)):
        return f"the function '{name}'" if _needs_arguments(value) else f"{name} itself, which must be called"
    return f"a value of type {type(value).__name__}"


def _needs_arguments(value: Callable[..., object]) -> bool:
    """Return whether a function, other than a class, cannot be called without arguments."""
    if isinstance(value, type):
        return False
    try:
        inspect.signature(value).bind()
    except TypeError:
        return True
    except ValueError:  # as of some functions in C
        return False
    return False
