"""What a run did, for people: tables, figures and one self-contained page, read from run folders alone."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedcover.errors import check_extra
from fedcover.report.loading import LoadedRun, load_run
from fedcover.report.table import comparison_rows
from fedcover.report.traffic import client_rows, left_out_rows

if TYPE_CHECKING:
    from fedcover.report.figures import export_figures
    from fedcover.report.page import write_report

__all__ = ["LoadedRun", "client_rows", "comparison_rows", "export_figures", "left_out_rows", "load_run", "write_report"]

DRAWN = {"export_figures": "figures", "write_report": "page"}
"""Functions that need matplotlib, and their modules: imported at first use, so that tables do not need it."""


def __getattr__(name: str) -> Any:
    if name not in DRAWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_extra("report", "drawing a report", "matplotlib", "PIL")
    return getattr(import_module(f"{__name__}.{DRAWN[name]}"), name)
