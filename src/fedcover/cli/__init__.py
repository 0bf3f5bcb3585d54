"""The ``fedcover`` command."""

from fedcover.cli.app import app


def main() -> None:
    """Run the command line."""
    app(prog_name="fedcover")


__all__ = ["app", "main"]
