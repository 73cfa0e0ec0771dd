"""Backends run models: one file per runtime, each a subclass of `base.Backend`."""
