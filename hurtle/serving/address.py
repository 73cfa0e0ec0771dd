"""Hosts and ports as text, such as 127.0.0.1:8000 and [::1]:8000."""

from __future__ import annotations

from typing import Any


def joined(host: str, port: int | None) -> str:
    """Host and port, as URLs have them.

    Example:
        >>> joined("::1", 8000)
        '[::1]:8000'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer_name(address: Any) -> str:
    """What a socket says its peer is, for the log."""
    return joined(address[0], address[1]) if isinstance(address, tuple) else str(address or "")
