"""The examples in the docstrings of hurtle.tracking are true."""

import doctest
import importlib
import pkgutil

import hurtle.tracking


def test_examples():
    names = [module.name for module in pkgutil.iter_modules(hurtle.tracking.__path__)]
    results = {name: doctest.testmod(importlib.import_module(f"hurtle.tracking.{name}")) for name in names}
    assert [name for name, result in results.items() if result.failed] == []
    assert sum(result.attempted for result in results.values()) >= 12
