"""Settings of runs (`schema`), objects chosen by name (`choices`), and the federation that they describe (`build`)."""

from fedcover.errors import check_extra

check_extra("cli", "reading settings", "pydantic")
