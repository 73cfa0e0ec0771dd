"""Adapters that let other libraries train on Hurtle's envs; each module needs its library and is imported explicitly."""
