"""References: the name of a class in a file, and the file's class by that name."""

import sys
import types

import pytest

from hurtle.envs.cartpole import CartPole
from hurtle.envs.registry import name_of
from hurtle.errors import HurtleError, UnknownNameError
from hurtle.references import load_reference, reference_to

GUARDED = 'class Tiny:\n    class Inner: ...\n\nif __name__ == "__main__":\n    print(Tiny)\n'


def module_of(monkeypatch, file, text, name="my_env"):
    """The module of a file, as an import leaves it."""
    file.write_text(text)
    module = types.ModuleType(name)
    module.__file__ = str(file)
    exec(compile(text.replace("__main__", "-"), str(file), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("name", ["my_env", "__main__"])
def test_a_class_in_a_file_has_a_name_that_leads_back_to_it(tmp_path, monkeypatch, name):
    file = tmp_path / "my_env.py"
    module = module_of(monkeypatch, file, GUARDED, name)
    reference = reference_to(module.Tiny)
    assert reference == f"{file.resolve()}:Tiny"
    again = load_reference(reference)
    assert again.__name__ == "Tiny"
    assert reference_to(again) == reference


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("from . import x\nclass Tiny: ...", "my_env", "my_env.py has relative imports, which work only inside its package"),
        (
            "class Tiny: ...\ntrain = 1",
            "__main__",
            "my_env.py would train again when Tiny is imported from it: call train under",
        ),
    ],
)
def test_files_that_cannot_be_imported_again(tmp_path, monkeypatch, text, name, message):
    module = module_of(monkeypatch, tmp_path / "my_env.py", text.replace("from . import x", ""), name)
    (tmp_path / "my_env.py").write_text(text)
    with pytest.raises(UnknownNameError, match=message):
        reference_to(module.Tiny)


def test_what_has_no_name(tmp_path, monkeypatch):
    module = module_of(monkeypatch, tmp_path / "my_env.py", GUARDED)
    for value in (module.Tiny.Inner, lambda: None):
        with pytest.raises(UnknownNameError, match="is not at the top level of a file"):
            reference_to(value)
    with pytest.raises(UnknownNameError, match="is neither a class nor a function"):
        reference_to(module.Tiny())
    del module.__file__
    with pytest.raises(UnknownNameError, match="Tiny was not defined in a file"):
        reference_to(module.Tiny)


def test_names_of_envs():
    assert name_of("CartPole-v1") == "CartPole-v1"
    assert name_of(CartPole) == "cartpole"
    with pytest.raises(UnknownNameError, match=r"CartPole\(\) is an instance: pass its class"):
        name_of(CartPole())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nimport nowhere", r"ModuleNotFoundError: No module named 'nowhere' \(line 2\)\."),
        ("def f():\n    return 1 / 0\nx = f()", r"ZeroDivisionError: division by zero \(line 2\)\."),
        ("class Tiny:\n  x = (", r"SyntaxError: '\(' was never closed \(my_env\.py, line 2\)\."),
    ],
)
def test_a_file_that_fails_is_an_error_with_its_line(tmp_path, text, said):
    file = tmp_path / "my_env.py"
    file.write_text(text)
    before = set(sys.modules)
    with pytest.raises(HurtleError, match=rf"my_env\.py cannot be imported: {said}") as caught:
        load_reference(f"{file}:Tiny")
    assert not isinstance(caught.value, UnknownNameError)
    assert caught.value.__cause__ is not None
    assert not {name for name in set(sys.modules) - before if name.startswith("hurtle_user_")}
