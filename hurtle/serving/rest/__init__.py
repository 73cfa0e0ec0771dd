"""REST: bytes → HTTP/1.1 → routes → `InferenceService`; and the web page at /."""
