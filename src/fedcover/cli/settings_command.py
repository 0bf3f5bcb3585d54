"""Commands that take settings with ``--set``, and say so if a setting is given as an option."""

import click
from typer.core import TyperCommand

from fedcover.config.schema import valid_keys
from fedcover.config.setting_names import settings_named


class SettingsCommand(TyperCommand):
    """A command whose settings are given with ``--set``; ``--rounds 3`` is answered with ``--set rounds=...``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; an unknown option that is the name of a setting is reported as such."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            names = settings_named(error.option_name.lstrip("-").replace("-", "_"), valid_keys())
            if not names:
                raise
            message = f"No such option: {error.option_name}. It is a setting: use --set {names[0]}=VALUE"
            raise click.UsageError(message, ctx) from None
