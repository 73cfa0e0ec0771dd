"""Settings, the local training loop, and what is done with a trained run; not how an update is computed."""
