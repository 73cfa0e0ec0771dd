"""Comparing runs, and plotting their metrics."""

import doctest
import json
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from made_runs import append, make_run

import hurtle
from hurtle.cli import main
from hurtle.cli.compare import named_runs
from hurtle.errors import HurtleError, UnknownNameError
from hurtle.experiments.curves_of_runs import RunCurves
from hurtle.experiments.figures import COLOURS
from hurtle.experiments.plotting import plot
from hurtle.experiments.statistics import Estimate

pytest.importorskip("matplotlib")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Three seeds of PPO and two of A2C on cartpole, with another learning rate; in ./runs."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    for seed in range(3):
        make_run(folder, seed=seed, name=f"ppo-{seed}", slope=seed + 1.0, evaluation=10.0 * seed)
    for seed in range(2):
        make_run(folder, seed=seed, name=f"a2c-{seed}", algorithm="a2c", slope=0.5, evaluation=1.0, learning_rate=0.01)
    return folder


def test_runs_that_differ_in_their_seed_are_one_method(runs):
    found = hurtle.compare(["runs/*"])
    assert (found.tasks, found.methods) == (["cartpole"], ["a2c", "ppo"])
    a2c, ppo = found.groups
    assert [run.seed for run in ppo.runs] == [0, 1, 2]
    assert ppo.finals == (0.0, 10.0, 20.0)
    assert ppo.final == Estimate.of([0.0, 10.0, 20.0])
    curve = ppo.curves["steps"]
    np.testing.assert_allclose(curve.middle, curve.x / 100 * 2)  # slopes 1, 2 and 3: fewer than four are not trimmed
    np.testing.assert_allclose(ppo.curves["seconds"].middle, ppo.curves["seconds"].x / 0.5 * 2)
    assert (a2c.curves["steps"].low == a2c.curves["steps"].high).all()
    assert not found.profiles
    assert not found.notes


def test_the_table_and_the_settings_that_differ(runs):
    found = hurtle.compare(["runs/ppo-*", "runs/a2c-*"], target=20.0)
    header, rows = found.table()
    assert header == ["method", "runs", "evaluation: IQM [95 %]", "steps", "steps/s", "seconds", "seconds to 20"]
    assert rows[0] == ["ppo", "3", "10.00 [0, 20.00]", "1.00K", "200", "5.000", "4.250 [3.500, 5.000] (2 of 3)"]
    assert rows[1][-1] == "- (0 of 2)"
    settings = found.settings
    assert settings["learning_rate"] == {"ppo": "0.001", "a2c": "0.01"}
    assert "clip_range" not in settings  # A2C has none
    assert "seed" not in settings
    assert "name" not in settings
    assert json.loads(json.dumps(found.to_dict()))["groups"][0]["finals"] == [0.0, 10.0, 20.0]
    assert "ppo     3     10.00 [0, 20.00]" in str(found)


def test_methods_are_called_by_what_tells_them_apart(tmp_path):
    for name, settings in {"a": {}, "b": {"gamma": 0.9}, "c": {"gamma": 0.9, "hidden_sizes": (8, 8)}}.items():
        make_run(tmp_path, name=name, **settings)
    assert hurtle.compare([tmp_path]).methods == [
        "ppo hidden_sizes=64 64 gamma=0.98",
        "ppo hidden_sizes=64 64 gamma=0.9",
        "ppo hidden_sizes=8 8 gamma=0.9",
    ]
    named = hurtle.compare({"ours": tmp_path / "a", "theirs": [tmp_path / "b", tmp_path / "c"]})
    assert [(group.method, len(group.runs)) for group in named.groups] == [("ours", 1), ("theirs", 2)]
    assert named.settings["hidden_sizes"] == {"ours": "64 64", "theirs": "64 64 | 8 8"}
    with pytest.raises(HurtleError, match="is in two methods: x and y"):
        hurtle.compare({"x": tmp_path / "a", "y": tmp_path})


@pytest.fixture
def tasks(tmp_path):
    """Two methods on three tasks; the third was played by one of them."""
    for env, algorithm, values in (
        ("cartpole", "ppo", (3.0, 5.0)), ("cartpole", "a2c", (1.0, 3.0, 2.0)),
        ("pendulum", "ppo", (-100.0,)), ("pendulum", "a2c", (-300.0, -100.0)),
        ("acrobot", "ppo", (-80.0,)),
    ):  # fmt: skip
        for seed, value in enumerate(values):
            make_run(tmp_path, seed=seed, env=env, algorithm=algorithm, name=f"{env}-{algorithm}-{seed}", evaluation=value)
    return tmp_path


def test_several_tasks_give_profiles_and_probabilities(tasks):
    found = hurtle.compare([tasks])
    assert found.tasks == ["acrobot", "cartpole", "pendulum"]
    # cartpole from 1 to 5: PPO 0.5, 1; A2C 0, 0.5, 0.25. pendulum from -300 to -100: PPO 1; A2C 0, 1.
    assert found.overalls["ppo"].value == pytest.approx((0.5 + 1 + 1) / 3)
    assert found.overalls["a2c"].value == pytest.approx((0 + 0.25 + 0.5 + 0 + 1 - 1 - 0) / 3)  # without the best and the worst
    wins = (5.5 / 6 + 1.5 / 2) / 2
    assert found.improvements["ppo", "a2c"].value == pytest.approx(wins)
    assert found.improvements["a2c", "ppo"].value == pytest.approx(1 - wins)
    assert found.profiles["a2c"].middle[50] == pytest.approx((0 / 3 + 1 / 2) / 2)  # above 0.5
    assert found.notes == ("Profiles leave out acrobot: not every method has returns there.",)
    header, rows = found.tasks_table()
    assert header == ["method", "normalized IQM [95 %]", "beats ppo", "beats a2c"]
    assert rows[0][2] == ""
    assert rows[0][3].startswith("0.8333")


def test_an_algorithm_with_two_settings_on_several_tasks_needs_names(tasks):
    make_run(tasks, env="cartpole", name="other", gamma=0.5)
    with pytest.raises(HurtleError, match=r"ppo has runs with 2 different settings on cartpole.*fast='runs/fast-\*'"):
        hurtle.compare([tasks])
    assert hurtle.compare({"new": tasks / "other", "old": [tasks / "cartpole-ppo-0", tasks / "pendulum-ppo-0"]}).methods == [
        "new",
        "old",
    ]


def test_env_parameters_make_tasks(tmp_path):
    make_run(tmp_path, name="earth")
    make_run(tmp_path, name="moon", env_parameters={"gravity": 1.6})
    assert hurtle.compare([tmp_path]).tasks == ["cartpole", "cartpole gravity=1.6"]


def test_runs_that_have_not_come_far(runs):
    make_run(runs, seed=7, name="ppo-crashed", stopped_by=None, points=3)
    make_run(runs, seed=8, name="ppo-empty", stopped_by=None, points=0)
    append(runs / "ppo-1", '{"step": 1100, "steps": 11')  # half written
    found = hurtle.compare(["runs/ppo-*"])
    assert len(found.groups[0].runs) == 3
    assert any("ppo-empty has no metrics yet" in note for note in found.notes)
    assert any("ppo-crashed crashed after 200 of 1,000 steps" in note for note in found.notes)
    alone = hurtle.compare(["runs/ppo-crashed"])
    assert alone.groups[0].runs[0].steps == 200
    assert not alone.is_evaluated  # it was not
    with pytest.raises(HurtleError, match=r"nothing to compare yet\. Left out: .*ppo-empty has no metrics yet"):
        hurtle.compare(["runs/ppo-empty"])
    none = make_run(runs, name="no-episode", returns=[None] * 5)
    short = hurtle.compare([none], metric="value_loss")
    assert short.groups[0].finals == ()
    assert short.table()[1][0][2] == "-"
    with pytest.raises(UnknownNameError, match="No run has the metric 'return'"):
        hurtle.compare([none])


def test_mistakes(runs):
    with pytest.raises(HurtleError, match=r"Did you mean .*ppo-0\?"):
        hurtle.compare(["runs/ppo-O"])
    with pytest.raises(HurtleError, match="Compare which runs"):
        hurtle.compare([])
    with pytest.raises(UnknownNameError, match=r"No run has the metric 'value_los'\. Did you mean value_loss"):
        hurtle.compare(["runs/ppo-0"], metric="value_los")


def pixels(file):
    from matplotlib.image import imread

    return (imread(file)[:, :, :3] * 255).round().astype(int)


def count(picture, colour):
    wanted = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    return int((np.abs(picture - wanted).max(axis=2) < 4).sum())


def test_the_picture_has_a_line_and_a_band_for_each_method(runs, tmp_path):
    found = hurtle.compare(["runs/ppo-*", "runs/a2c-*"])
    picture = pixels(found.write_png(tmp_path / "new" / "picture.png"))
    assert count(picture, COLOURS[0]) > 500
    assert count(picture, COLOURS[1]) > 500
    assert count(picture, COLOURS[2]) == 0
    band = "#d0e2ef"  # 18 % of the first colour on white
    assert count(picture, band) > 5000


class Page(HTMLParser):
    """Checks that tags are closed, and collects what is loaded."""

    VOID = ("meta", "input", "line", "path", "use", "circle", "rect", "br")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.loads, self.cells = [], [], [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.loads += [
            value for name, value in attributes if name in ("src", "href", "xlink:href") and not value.startswith("#")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_the_page_is_whole_and_loads_nothing(tasks, tmp_path):
    found = hurtle.compare({"<ours> & co": tasks / "*-ppo-*", "theirs": tasks / "*-a2c-*"})
    text = found.write_html(tmp_path / "page.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.loads == []
    assert "@import" not in text
    assert len(set(page.ids)) == len(page.ids)
    references = re.findall(r'(?:url\(#|href="#)([^)"]+)', text)
    assert references
    assert set(references) <= set(page.ids)
    assert "<ours> & co" in page.cells
    assert "<ours>" not in text
    pictures = re.findall(r"<svg [^>]*viewBox.*?</svg>", text, flags=re.DOTALL)
    assert len(pictures) == 3 * 2 + 2
    for picture in pictures:
        ET.fromstring(picture)
    lines = [name for name in page.ids if name.endswith("line-method-0")]
    assert len(lines) == 3 * 2 + 1  # what the legend shows and hides: each task twice, and the profile
    assert text == found.write_html(tmp_path / "again.html").read_text()


def test_curves_of_a_run(tmp_path):
    path = make_run(tmp_path, returns=[None, 2.0, 4.0, None, 8.0])
    append(path, {"step": 400, "steps": 400, "eval_return": 5.0})
    append(path, {"step": 450, "steps": 450, "seconds": None, "eval_return": 6.0})
    run = RunCurves(path)
    assert run.names == ["episode_return", "value_loss", "episodes", "eval_return"]
    assert run.curve("return").tolist() == [[100, 2], [200, 4], [400, 8]]
    assert run.curve("return", smooth=2).tolist() == [[100, 2], [200, 3], [400, 6]]
    assert run.curve("return", "seconds").tolist() == [[0.5, 2], [1, 4], [2, 8]]
    assert run.curve("evaluation").tolist() == [[400, 5], [450, 6]]
    assert run.curve("evaluation", "seconds").tolist() == [[2.0, 6.0]]  # both after the last update
    assert run.curve("nothing").shape == (0, 2)
    assert run.seconds_to(4.0) == 1.0
    assert np.isnan(run.seconds_to(9.0))


def test_plots(runs, tmp_path):
    (runs / "many").mkdir()
    for seed in range(2):
        make_run(runs / "many", seed=seed, name=f"seed-{seed}", slope=-1.0 - seed)
    (runs / "many" / "seeds.toml").write_text("seeds = [0, 1]\n")
    one = pixels(plot(["ppo-0"], tmp_path / "one.png"))
    assert count(one, COLOURS[0]) > 500
    assert count(one, COLOURS[1]) == 0
    several = pixels(plot(["ppo-0", "many"], tmp_path / "plot.png", ["return", "value_loss", "episodes"], "seconds", 3))
    assert several.shape[0] > one.shape[0]
    assert count(several, COLOURS[1]) > 500
    with pytest.raises(UnknownNameError, match=r"No run has the metric 'retrun'\. Did you mean return"):
        plot(["ppo-0"], metrics=["retrun"])
    with pytest.raises(UnknownNameError, match=r"No x axis 'second'\. Did you mean seconds"):
        plot(["ppo-0"], x="second")


def test_the_command_lines(runs, capsys, monkeypatch):
    line = ["compare", "runs/ppo-*", "runs/a2c-*", "--return", "20", "--out", "out/mine.html"]
    assert main(line) == 0
    out = capsys.readouterr().out
    assert "seconds to 20" in out
    assert "learning_rate" in out
    assert out.splitlines()[-2:] == ["written     out/mine.png", "written     out/mine.html"]
    assert main(["compare", "first=runs/ppo-0", "second=runs/ppo-1", "--json"]) == 0
    assert [group["method"] for group in json.loads(capsys.readouterr().out)["groups"]] == ["first", "second"]
    assert main(["plot", "ppo-0", "--metrics", "return", "value_loss", "--smooth", "2", "--x", "seconds"]) == 0
    assert capsys.readouterr().out == "written     plot.png\n"
    for words, message in {
        "compare": "Compare which runs?",
        "plot": "Plot which runs?",
        "compare nowhere": "There is no run nowhere",
        "plot ppo-0 --smooth 0": "--smooth must be at least 1, got 0",
        "plot ppo-0 --metrics": "--metrics needs at least one name",
        "compare ppo-0 --return high": "--return must be a number, got 'high'",
    }.items():
        assert main(words.split()) == 2, words
        assert message in capsys.readouterr().err, words
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["compare", "ppo-0"]) == 0
    assert 'No pictures: Matplotlib is not installed: pip install "hurtle[tracking]".' in capsys.readouterr().out


def test_names_are_split_only_where_there_is_no_such_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert named_runs(("a=b",)) == ["a=b"]
    assert named_runs(("x=1", "x=2", "y=3")) == {"x": ["1", "2"], "y": ["3"]}
    assert named_runs(("x=1", "z")) == {"x": ["1"], "": ["z"]}


def test_the_example_of_compare(tmp_path):
    run, other = (type("Run", (), {"path": make_run(tmp_path, seed=seed)}) for seed in range(2))
    example = doctest.DocTestParser().get_doctest(
        hurtle.compare.__doc__, {"compare": hurtle.compare, "run": run, "other": other}, "compare", None, 0
    )
    assert doctest.DocTestRunner().run(example) == (0, 2)
