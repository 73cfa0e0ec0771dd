"""The inference server: transport (gRPC, REST) → `InferenceService` → executor (inline, worker, batch) → backend."""
