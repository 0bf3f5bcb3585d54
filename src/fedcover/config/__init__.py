"""Settings of runs (`schema`), of policies (`policy_settings`), and the federation that they describe (`build`)."""

from fedcover.errors import check_extra

check_extra("cli", "reading settings", "pydantic")
