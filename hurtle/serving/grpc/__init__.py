"""gRPC: bytes → HTTP/2 frames → calls → `InferenceService`. Written by hand: grpcio's servers cost more than a small model."""
