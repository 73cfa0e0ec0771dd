"""The zoo: one file per environment, written with `hurtle.native`; `registry.py` finds them by name."""
