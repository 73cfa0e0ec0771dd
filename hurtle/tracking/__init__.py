"""The records of a run: metrics, dashboard, checkpoints, run folder, plots. Knows nothing of algorithms."""
