"""Budgets for policies that prune, if the user sets none."""

from fedcover.calibration import BudgetUnit
from fedcover.config.schema import Config
from fedcover.errors import InputError

PAPERS_CODE = "1111223344"
"""The paper's code of budgets for *WP-M1: three sizes of masks, which cover the model evenly."""


def with_default_budgets(config: Config) -> Config:
    """Return settings in which a policy that prunes has budgets to prune to: the paper's 1111223344 if no code is set.

    Without them every client would train the whole model, whatever the policy. A policy that ignores budgets has a
    whole model for each slot or client.

    >>> from fedcover.config.schema import check_config
    >>> with_default_budgets(check_config({"policy": {"name": "HeteroFL"}, "cohort": 5})).budgets.code
    '11234'
    >>> with_default_budgets(check_config({"policy": {"name": "full"}, "cohort": 5})).budgets.code
    '5x1'
    """
    budgets = config.budgets
    if "code" in budgets.model_fields_set:
        return config
    count = config.cohort if budgets.by == "slot" else min(len(PAPERS_CODE), config.data.clients)
    if config.policy.choice.build().traits().ignores_budgets:
        fits = budgets.unit != "fraction" or count == len(budgets.code)
        return config if fits else _with_code(config, f"{count}x1")
    if not BudgetUnit(budgets.unit, budgets.calibration).plain:
        raise InputError(f"budgets in {budgets.unit} need a code, such as --set budgets.code=159010,9x80000")
    code = "".join(PAPERS_CODE[slot * len(PAPERS_CODE) // count] for slot in range(count))
    return _with_code(config, code)


def _with_code(config: Config, code: str) -> Config:
    return config.model_copy(update={"budgets": config.budgets.model_copy(update={"code": code})})
