"""Policies: torch networks, distributions of actions, memory and normalizers."""
