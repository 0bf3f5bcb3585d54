"""``python -m fedcover``, and the ``fedcover`` command."""

import sys

from fedcover.errors import MissingExtraError, check_extra


def main() -> None:
    """Run the command line; without its packages, print how to install them and exit with code 2."""
    try:
        check_extra("cli", "the command line", "typer", "rich", "pydantic")
    except MissingExtraError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        from fedcover.cli import main as run_command
    except KeyboardInterrupt:  # commands handle it themselves
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    run_command()


if __name__ == "__main__":
    main()
