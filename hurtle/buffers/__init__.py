"""Memory between collecting and learning."""
