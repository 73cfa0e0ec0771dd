"""The zoo: one file per environment, written on `hurtle.native`; `registry.py` finds them by name."""
