"""The limits announced to an HTTP/2 client, and the answer to one that speaks HTTP/1."""

from __future__ import annotations

from hurtle.serving.grpc.http2_frames import (
    DEFAULT_WINDOW,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_HEADER_LIST_SIZE,
    settings,
    window_update,
)

MAX_STREAMS = 1024
STREAM_WINDOW = 1 << 16
"""Bytes that a client may send on a stream before the size of its message is known."""
CONNECTION_WINDOW = 1 << 30
"""Large enough never to be the limit; the streams' windows are."""
MAX_UNSENT = 1 << 20
"""Unsent bytes beyond which nothing more is read from a peer that does not read."""
OUR_SETTINGS = settings(
    [(MAX_CONCURRENT_STREAMS, MAX_STREAMS), (INITIAL_WINDOW_SIZE, STREAM_WINDOW), (MAX_HEADER_LIST_SIZE, 1 << 14)]
) + window_update(0, CONNECTION_WINDOW - DEFAULT_WINDOW)
HTTP1_VERBS = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTIONS", b"DELETE", b"PATCH")
_TEXT = b"This port speaks gRPC, which is HTTP/2; HTTP/1 has a port of its own.\n"
HTTP1_ANSWER = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_TEXT), _TEXT)
)
