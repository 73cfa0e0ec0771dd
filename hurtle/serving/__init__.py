"""The inference server: transport (gRPC, REST) → shell → executor (inline, worker, batch) → backend. Knows no training."""
