"""What runs a model: one file per runtime, each a subclass of `base.Backend`."""
