"""The documentation does what it says: its Python blocks run, print what is printed there, and its links lead somewhere.

Each page's ```python blocks run in order as one file, on the page's own line numbers. A ```text output block is what the
block before it prints. Blocks tagged ```python no-run are only compiled: they need a GPU, or tritonclient, which lives in an
environment of its own.
"""

import ast
import itertools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import pytest

from hurtle.envs.packages import make_gymnasium
from hurtle.envs.registry import names, native_class, resolve
from hurtle.errors import HurtleError

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")] if path.exists())
ZOO = ROOT / "docs" / "environments.md"
MAX_IMAGE_BYTES = 20_000
TIMEOUT = 300  # seconds; a hang must not look like slow compilation
MARK = "\x1e"

# Runs each page whose path it is told in a fork of its own, so that all of them share the seconds that the imports take.
RUNNER = f"""
import faulthandler, gc, os, runpy, sys
gc.disable()  # imports make many objects, and all of them stay
import matplotlib.figure, torch, hurtle.runners.trainer, quick_export

hurtle.make("cartpole")  # loads compiled code, and the parts of Numba that it needs
torch.onnx.export(torch.nn.Linear(1, 1).eval(), (torch.zeros(1, 1),), dynamo=True, verbose=False)  # and those of torch
gc.freeze()  # else every fork would go through all of it again when it ends
gc.enable()
for line in sys.stdin:
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
page = line.rstrip()
folder = os.path.dirname(page)
for number, name in enumerate((os.devnull, page + ".out", page + ".err")):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
os.chdir(folder)
sys.argv, sys.path[0] = [page], folder
faulthandler.dump_traceback_later({TIMEOUT}, exit=True)
runpy.run_path(page, run_name="__main__")
"""

# The zoo page makes every env once. Compiling them all takes longer than all other pages together, and tests/envs does it.
PRELUDE = {"environments.md": "import functools, hurtle; hurtle.make = functools.partial(hurtle.make, debug=True)"}

# Curves take longer than the short runs that they show; this page draws its own.
DRAWN = ("training.md",)
NO_CURVE = "import hurtle.runners.reporting; hurtle.runners.reporting.plot_run = lambda folder: None"

# Ray takes as long to start as several pages take to run, and the tests of vectors and runners start it too.
SLOW = ("ray.md", "cluster.md")


@dataclass
class Block:
    """One fenced block of a page."""

    info: str
    line: int
    lines: list[str]


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    inside = None
    for number, line in enumerate(page.read_text().split("\n"), 1):
        if inside is None and line.startswith("```"):
            inside = Block(line.removeprefix("```").strip(), number + 1, [])
        elif inside is not None and line.startswith("```"):
            found.append(inside)
            inside = None
        elif inside is not None:
            inside.lines.append(line)
    assert inside is None, f"{page.name}:{inside.line - 1}: the block is not closed"
    return found


def as_program(page: Path, blocks: list[Block]) -> str:
    """The page as a Python file: its blocks on their own lines, and a mark printed after each."""
    lines = [""] * (len(page.read_text().split("\n")) + 1)
    lines[0] = PRELUDE.get(page.name, "" if page.name in DRAWN else NO_CURVE)
    for block in blocks:
        lines[block.line - 1 : block.line - 1 + len(block.lines)] = block.lines
        lines[block.line - 1 + len(block.lines)] = f"print({MARK!r})"  # in place of the closing fence
    return "\n".join(lines)


@pytest.fixture(scope="module")
def run_page():
    """A function that runs a page's program in its own folder, as `python` would; returns exit status, output and errors."""
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}  # what the pages print is without a GPU
    command = [sys.executable, "-c", RUNNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as runner:

        def run(program: Path) -> tuple[int, str, str]:
            print(program, file=runner.stdin, flush=True)
            status = int(runner.stdout.readline())
            return status, *(Path(f"{program}.{end}").read_text() for end in ("out", "err"))

        yield run
        runner.stdin.close()


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name in SLOW)) for page in PAGES]
)
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path, run_page):
    every = blocks_of(page)
    runnable = [block for block in every if block.info == "python"]
    if not runnable:
        pytest.skip("no Python on this page")
    program = tmp_path / f"page_{page.stem.replace('-', '_').lower()}.py"
    program.write_text(as_program(page, runnable))
    status, output, errors = run_page(program)
    assert status == 0, f"{page.name} (line numbers are the page's):\n{errors[-4000:]}"
    printed = dict(zip((block.line for block in runnable), output.split(MARK + "\n"), strict=False))
    for block, after in itertools.pairwise(every):
        if after.info == "text output":
            assert block.info == "python", f"{page.name}:{after.line}: output of a block that does not run"
            assert printed[block.line].strip("\n") == "\n".join(after.lines), f"{page.name}:{after.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_blocks_that_do_not_run_have_a_reason_and_compile(page):
    for block in blocks_of(page):
        assert block.info in ("python", "python no-run") or "python" not in block.info, f"{page.name}:{block.line}"
        if block.info == "python no-run":
            text = "\n".join(block.lines)
            assert "cuda" in text or "tritonclient" in text, f"{page.name}:{block.line}: why is it left out?"
            ast.parse(text, f"{page.name}:{block.line}")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, heading = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name} links to {target}"
        if heading:
            assert heading in anchors(path), f"{page.name} links to {target}; headings: {sorted(anchors(path))}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def zoo_section(name: str) -> str:
    sections = re.split(r"^### ", ZOO.read_text(), flags=re.MULTILINE)
    found = [section for section in sections if section.split("\n")[0].strip() == name]
    assert len(found) == 1, f"{ZOO.name} needs one section '### {name}'"
    return found[0]


@pytest.mark.parametrize("name", names())
def test_zoo_page_lists_each_parameter_with_its_default(name):
    env = native_class(name)
    engine = {"max_steps", "num_agents"} - set(getattr(env, "__annotations__", {}))
    expected = {key: repr(value) for key, value in env.parameters().items() if key not in engine}
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| .+ \|$", zoo_section(name), flags=re.MULTILINE)
    written = dict(rows)
    assert set(written) == set(expected)
    for key, default in written.items():
        assert float(eval(default, {"pi": 3.141592653589793})) == pytest.approx(float(eval(expected[key]))), key


@pytest.mark.parametrize("name", names())
def test_zoo_page_shows_each_env(name):
    section = zoo_section(name)
    assert f"(images/{name}.png)" in section
    assert f'"{name}"' in section
    assert (ROOT / "docs" / "images" / f"{name}.png").stat().st_size <= MAX_IMAGE_BYTES


def test_the_tests_that_the_algorithms_page_names_exist():
    file, named, missing = "", 0, []
    for found in re.finditer(r"`(tests/[\w/]+\.py)?::(test_\w+)`", (ROOT / "docs" / "algorithms.md").read_text()):
        file, named = found[1] or file, named + 1
        functions = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        missing += [f"{file}::{found[2]}"] * (found[2] not in functions)
    assert named > 50
    assert not missing


# How pages name envs: in calls, on the command line, and as ids of other packages anywhere.
ENV_NAMES = (
    r'\b(?:make|make_vec|train|play)\(\s*"([^"]+)"',
    r"\bhurtle (?:train|envs|bench vector) ([\w./-]+)",
    r"--env ([\w./-]+)",
    r"[`\"]((?:atari|ALE|pettingzoo)/[\w./-]+)[`\"]",
    r"(?<![\w/-])((?:MiniGrid-|BabyAI-)?[A-Z]\w+(?:-[\w]+)*-v\d+)\b",
)
MADE_UP = {"ENV", "MyEnv-v0", "house"}  # a page's own, or a place for the reader's


def envs_of(text):
    """The names of envs on a page, without flags and the reader's own files."""
    found = {name for pattern in ENV_NAMES for name in re.findall(pattern, text)}
    return {name for name in found if not name.startswith("-") and ".py" not in name} - MADE_UP


def test_names_of_envs_are_found_wherever_they_stand():
    text = (
        'play("CartPole-v1")  # or "atari/Pong", "pettingzoo/sisl/pursuit_v4"\n$ hurtle train snake --seed 3\nalso Hopper-v5.'
    )
    assert envs_of(text) == {"CartPole-v1", "atari/Pong", "pettingzoo/sisl/pursuit_v4", "snake", "Hopper-v5"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_env_that_a_page_names_exists(page):
    for name in sorted(envs_of(page.read_text())):
        try:
            found = resolve(name, {})
        except HurtleError as error:
            if "pip install" not in str(error):  # only an extra may be missing
                raise
            continue
        if getattr(found, "func", None) is make_gymnasium:
            known = getattr(found.args[0], "id", name)  # of a short name such as "minigrid/Empty-5x5"
            assert known in gymnasium.registry, f"{page.name} names {name}"
