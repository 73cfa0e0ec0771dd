"""Addresses as text, such as 127.0.0.1:8000 and [::1]:8000."""

from __future__ import annotations

from typing import Any


def joined(host: str, port: int | None) -> str:
    """Host and port, as written in URLs.

    Example:
        >>> joined("::1", 8000)
        '[::1]:8000'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer_name(address: Any) -> str:
    """A socket's peer address, for the log."""
    return joined(address[0], address[1]) if isinstance(address, tuple) else str(address or "")
