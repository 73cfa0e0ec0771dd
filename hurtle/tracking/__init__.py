"""What a run tells and leaves behind: metrics, dashboard, checkpoints, run folder, plots. Knows no algorithms."""
