"""Flattens structured envs: an observation becomes one record of bytes, an action one vector, agents padded rows."""
