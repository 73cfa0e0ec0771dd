"""gRPC: bytes → HTTP/2 frames → calls → `Shell`. Written by hand, because the servers of grpcio cost more than small models."""
