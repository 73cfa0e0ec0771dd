"""REST: bytes → HTTP/1.1 → routes → `Shell`; and the page at /."""
