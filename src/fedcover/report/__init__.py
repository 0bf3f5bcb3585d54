"""Reports on finished and running runs: tables, figures and one self-contained page, read from run folders.

Names are imported on first use, so that tables and numbers do not need matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedcover.errors import check_extra

if TYPE_CHECKING:
    from fedcover.report.figures import export_figures
    from fedcover.report.loading import LoadedRun, load_run
    from fedcover.report.page import write_report
    from fedcover.report.table import comparison_rows, method_rows, paired_rows
    from fedcover.report.traffic import client_rows, left_out_rows

__all__ = [
    "LoadedRun",
    "client_rows",
    "comparison_rows",
    "export_figures",
    "left_out_rows",
    "load_run",
    "method_rows",
    "paired_rows",
    "write_report",
]

_MODULES = {
    "LoadedRun": "loading",
    "client_rows": "traffic",
    "comparison_rows": "table",
    "export_figures": "figures",
    "load_run": "loading",
    "left_out_rows": "traffic",
    "method_rows": "table",
    "paired_rows": "table",
    "write_report": "page",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name] in ("figures", "page"):
        check_extra("report", "drawing a report", "matplotlib", "PIL")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
