"""`hurtle bench serve`: a load generator that measures a server's throughput and latency."""
