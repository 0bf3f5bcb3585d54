"""What a run did, for people: tables, figures and one self-contained page, read from run folders alone."""

from fedcover.report.figures import export_figures
from fedcover.report.loading import LoadedRun, load_run
from fedcover.report.page import write_report
from fedcover.report.table import comparison_rows
from fedcover.report.traffic import client_rows, left_out_rows

__all__ = ["LoadedRun", "client_rows", "comparison_rows", "export_figures", "left_out_rows", "load_run", "write_report"]
