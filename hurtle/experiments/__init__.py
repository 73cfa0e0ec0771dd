"""Runs of runs: many seeds of one, comparisons, lists, plots. Knows run folders, and nothing of how a run works inside."""
