"""Structured spaces as flat ones: observations as one record of bytes, actions as one vector, agents as padded rows."""
