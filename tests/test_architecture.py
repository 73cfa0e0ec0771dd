"""The layers of docs/architecture.md: imports point only down, without circles. Lazy imports inside functions count."""

import ast
from pathlib import Path

import pytest

import hurtle

ROOT = Path(hurtle.__file__).parent
LAYERS = (
    ("__main__", "cli"),
    ("integrations",),
    ("serving",),
    ("experiments",),
    ("runners",),
    ("deploy",),
    ("algorithms",),
    ("collect",),
    ("policies",),
    ("buffers",),
    ("kernels",),
    ("vector",),
    ("emulation",),
    ("envs", "mujoco"),
    ("native",),
    ("tracking",),
    ("trust",),
    ("references",),
    ("contracts",),
    ("ranges", "errors", "garbage"),
)
"""From top to bottom; a file may import from its own layer and those below."""
PUBLIC = "hurtle"
"""`hurtle/__init__.py` loads the public names when they are first used; only its version is imported from below."""


def modules():
    found = {}
    for file in ROOT.rglob("*.py"):
        parts = ("hurtle", *file.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def parsed(file):
    return ast.parse(file.read_text(encoding="utf-8"))


def statements(tree):
    """All statements, however deep, but not what only type checkers read; expressions, most of a tree, hold none."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, field, [])


def imports_of(name, file, known):
    """The modules of the package that a file imports, anywhere in it, with the line; not what only type checkers read."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    found = {}
    for node in statements(parsed(file)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        found |= {other: node.lineno for other in names if other in known and other != name}
    return found


@pytest.fixture(scope="module")
def graph():
    known = modules()
    return {name: imports_of(name, file, known) for name, file in known.items()}


def layer(name):
    room = name.split(".")[1]
    return next((k for k, rooms in enumerate(LAYERS) if room in rooms), None)


def test_every_file_has_a_layer():
    rooms = {name.split(".")[1] for name in modules() if name != PUBLIC}
    assert rooms == {room for rooms in LAYERS for room in rooms}


def test_imports_point_down(graph):
    upward = [
        f"{name}:{line} imports {other}"
        for name, imported in graph.items()
        if name != PUBLIC
        for other, line in imported.items()
        if other != PUBLIC and layer(other) < layer(name)
    ]
    assert not upward


def test_there_is_no_circle(graph):
    """A depth-first search that meets a file it has not left yet has found a circle."""
    left, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in left:
            return None
        path.append(name)
        for other in graph[name]:
            if other != PUBLIC and (circle := visit(other)):
                return circle
        path.pop()
        left.add(name)
        return None

    circles = [circle for name in graph if name != PUBLIC and (circle := visit(name))]
    assert not circles


def test_imports_are_found_wherever_they_stand(tmp_path):
    """The reader itself: plain, relative, lazy; and not those for type checkers."""
    file = tmp_path / "b.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport hurtle.x\nfrom . import a\nfrom .a import name\n"
        "def f():\n    from hurtle.y import z\nif TYPE_CHECKING:\n    import hurtle.w\n"
        "try:\n    import hurtle.t1\nexcept ImportError:\n    import hurtle.t2\nelse:\n    import hurtle.t3\n"
        "finally:\n    import hurtle.t4\nmatch 1:\n    case 1:\n        import hurtle.t5\n"
        "if name:\n    pass\nelse:\n    with name:\n        for n in name:\n            import hurtle.t6\n"
    )
    nested = {f"hurtle.t{n}" for n in range(1, 7)}
    known = dict.fromkeys({f"hurtle.{name}" for name in ("x", "y", "y.z", "w", "room", "room.a", "room.b")} | nested)
    assert set(imports_of("hurtle.room.b", file, known)) == {"hurtle.x", "hurtle.room.a", "hurtle.y.z", *nested}


@pytest.mark.parametrize("room", ["runners", "algorithms", "collect"])
def test_nobody_asks_for_a_concrete_collector_or_learner(room):
    """Contracts carry what is special: gears.py and the gears' own files make the classes, and nothing tests for them."""
    classes = (
        "GeneralCollector",
        "PoolCollector",
        "NativeCollector",
        "DeviceCollector",
        "PPO",
        "DevicePPO",
        "A2C",
        "NativeA2C",
    )
    asked = []
    for file in (ROOT / room).rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "getattr", "hasattr"):
                text = ast.unparse(node)
                names = {ast.unparse(part) for part in ast.walk(node.args[1])} if len(node.args) > 1 else set()
                subject = ast.unparse(node.args[0]).rpartition(".")[2]
                if names & set(classes) or subject in ("collector", "learner", "_collector", "_learner"):
                    asked.append(f"{file.name}:{node.lineno} {text}")
    assert not asked
