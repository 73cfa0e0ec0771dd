"""Policies: torch networks, action distributions, memory and normalizers."""
