"""The web page at `/`: one HTML file, sent with a policy that allows its own script and style and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

HTML = Path(__file__).with_name("page.html").read_bytes()
ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" fill="#3b6fe0"/>'
    b'<path d="M7 20l5-8 5 6 3-5 5 7" fill="none" stroke="#fff" stroke-width="3" stroke-linecap="round"/>'
    b"</svg>"
)


def _hash_of(tag: str) -> str:
    """The hash of the only inline element with this tag, for the content security policy."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), HTML, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    f"Content-Security-Policy: {POLICY}\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
    "Cross-Origin-Opener-Policy: same-origin\r\nCache-Control: no-cache\r\n"
).encode()
