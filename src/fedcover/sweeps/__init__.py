"""Sweeps: many runs from one command, played in batches, resumable, with a table over seeds."""

from fedcover.sweeps.cells import SweepCell, cells_of
from fedcover.sweeps.folder import SweepFolder
from fedcover.sweeps.play import play_sweep
from fedcover.sweeps.table import sweep_rows

__all__ = ["SweepCell", "SweepFolder", "cells_of", "play_sweep", "sweep_rows"]
