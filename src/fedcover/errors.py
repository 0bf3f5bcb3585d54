"""The errors that users see: one sentence that names the thing, the value and the remedy."""


class FedcoverError(Exception):
    """Anything fedcover itself reports; ``str(error)`` is fit to show to a user."""


class InputError(FedcoverError, ValueError):
    """What the caller gave cannot be used: a setting, a file, a mask, a folder."""


class ClientError(FedcoverError):
    """A client failed; the message names the client, the round and the stage."""
