"""What a run did, for people: tables, figures and one self-contained page, read from run folders alone."""

from fedcover.report.figures import export_figures
from fedcover.report.page import write_report
from fedcover.report.run import Run, load_run
from fedcover.report.table import comparison_rows

__all__ = ["Run", "comparison_rows", "export_figures", "load_run", "write_report"]
