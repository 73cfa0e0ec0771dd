"""Definitions in `__main__` are sent to workers by value: run as a script, and as a notebook's cells."""

import functools
import json
import pickle
import subprocess
import sys
import threading
import weakref

import cloudpickle
import pytest

from hurtle.vector.pickling import dumps, dumps_by_value

ENVS = '''
import abc, collections, dataclasses, enum, functools, json, sys, threading, typing, weakref
import gymnasium, numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

import hurtle


class Pair(ParallelEnv):
    """With the caches that PettingZoo's own tutorial puts on the space methods."""

    metadata = {"name": "pair"}
    possible_agents = ["one", "two"]

    @functools.lru_cache(maxsize=None)
    def observation_space(self, agent):
        return spaces.Box(0, 9, (1,))

    @functools.lru_cache(maxsize=None)
    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.agents = self.possible_agents[:]
        return {a: np.zeros(1, np.float32) for a in self.agents}, {a: {} for a in self.agents}

    def step(self, actions):
        flags = {a: False for a in self.agents}
        observations = {a: np.full(1, actions[a], np.float32) for a in self.agents}
        return observations, {a: float(actions[a]) for a in self.agents}, flags, flags, {a: {} for a in self.agents}


@functools.lru_cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


@functools.cache
def square(n):
    return n * n


@functools.singledispatch
def kind(value):
    return "object"


@kind.register
def _(value: int):
    return "int"


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    @functools.lru_cache
    def other(self):
        return Color.BLUE if self is Color.RED else Color.RED


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(slots=True, frozen=True)
class Point:
    x: int = 3
    tags: list = dataclasses.field(default_factory=list)


class Named(typing.NamedTuple):
    a: int
    b: int = 2


T = typing.TypeVar("T")


class Stack(typing.Generic[T]):
    def __init__(self, *items: T):
        self.items = list(items)


class Base:
    def __init_subclass__(cls, tag="", **more):
        super().__init_subclass__(**more)
        cls.tag = tag


class Tagged(Base, tag="hello"):
    pass


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...


class Unit(Shape):
    def area(self):
        return 1


def counted(function):
    cached = functools.lru_cache(lambda *values: function(None, *values))

    @functools.wraps(function)
    def wrapper(self, *values):
        return cached(*values)

    return wrapper


lock = threading.Lock()
Record = collections.namedtuple("Record", "left right")


class Tour(gymnasium.Env):
    """Its info has one entry for each thing that must have travelled."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)
    made = weakref.WeakSet()

    class Part:
        def whole(self):
            return Tour

    def __init__(self, offset=0):
        Tour.made.add(self)
        self.offset = offset

    @functools.cached_property
    def answer(self):
        return 42

    def add(self, a, b):
        return a + b

    add_one = functools.partialmethod(add, 1)

    @functools.singledispatchmethod
    def told(self, value):
        return "object"

    @told.register
    def _(self, value: str):
        return "str"

    @counted
    def double(self, value):
        return 2 * value

    @functools.lru_cache(maxsize=5, typed=True)
    def cached(self, value):
        return value + self.offset

    def tour(self):
        with lock:
            return {
                "lru_cache, recursive": fib(10),
                "lru_cache, its settings": str(Tour.cached.cache_parameters()),
                "lru_cache, of a method": self.cached(1),
                "lru_cache, in a closure": self.double(4),
                "cache": square(3),
                "singledispatch": kind(1) + kind("x"),
                "singledispatchmethod": self.told("x") + self.told(1),
                "cached_property": self.answer,
                "partialmethod": self.add_one(2),
                "enum": str(Color.RED.other().name),
                "flag": int(Rights.READ | Rights.WRITE),
                "slots": Point().x + len(Point().tags),
                "NamedTuple": Named(1).b,
                "namedtuple": Record(1, 2).right,
                "Generic": len(Stack[int](1, 2).items),
                "__init_subclass__": Tagged.tag,
                "ABC": Unit().area(),
                "nested class": self.Part().whole() is type(self),
                "WeakSet": self in Tour.made,
            }

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {"tour": json.dumps(self.tour()), "color": Color.BLUE}
'''

USE = """
def closure(offset):
    return lambda: Tour(offset)


vec = hurtle.make_vec(closure(7), num_envs=1, backend="process", num_workers=1)
vec.reset(seed=0)
infos = vec.step(np.zeros(1, int))[4]
here = {**Tour(7).tour(), "an enum in an info": True, "Pair": [1.0, 2.0]}
there = {**json.loads(infos["tour"][0]), "an enum in an info": infos["color"][0] is Color.BLUE}
vec.close()
vec = hurtle.make_vec(Pair, num_envs=1, backend="process", num_workers=1)
vec.reset(seed=0)
there["Pair"] = vec.step(np.array([[1, 2]]))[1][0].tolist()
vec.close()
print(json.dumps([here, there]))
"""


def run(*arguments: str) -> tuple[dict, dict]:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def test_what_a_script_defines_travels(tmp_path):
    (tmp_path / "script.py").write_text(ENVS + USE)
    here, there = run(str(tmp_path / "script.py"))
    assert there == here


def test_what_a_notebook_defines_travels(tmp_path):
    cells = "import __main__\nfor cell in {!r}:\n    exec(compile(cell, '<cell>', 'exec'), vars(__main__))\n"
    here, there = run("-c", cells.format([ENVS, USE]))
    assert there == here


@functools.lru_cache
def importable():
    return 1


def test_a_cached_function_that_can_be_imported_goes_by_name():
    assert pickle.loads(dumps_by_value(importable)) is importable


def test_a_cached_function_of_a_module_registered_by_value_goes_by_value():
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        loaded = pickle.loads(dumps_by_value(importable))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert loaded is not importable
    assert loaded() == 1


@pytest.mark.parametrize("pickled", [dumps, dumps_by_value])
def test_a_cached_closure_keeps_its_settings_and_attributes(pickled):
    @functools.lru_cache(maxsize=3, typed=True)
    def cached(n):
        """Counts down."""
        return cached(n - 1) if n else "done"

    cached.note = "mine"
    loaded = pickle.loads(pickled(cached))
    assert loaded(2) == "done"
    assert loaded.cache_info().currsize == 3  # its recursion goes through its own cache
    assert loaded.cache_parameters() == {"maxsize": 3, "typed": True}
    assert (loaded.__doc__, loaded.note, loaded.__name__) == ("Counts down.", "mine", "cached")
    assert cached.cache_info().currsize == 0


def test_locks_and_weak_collections():
    lock, key = threading.Lock(), Exception
    with lock:
        loaded, weak = pickle.loads(dumps_by_value((lock, weakref.WeakKeyDictionary({key: 1}))))
    assert loaded.acquire(blocking=False)
    assert dict(weak) == {key: 1}
