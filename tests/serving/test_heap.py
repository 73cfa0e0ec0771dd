"""What is frozen for the garbage collector, and what is freed though it was frozen."""

CODE = """
import gc, sys, weakref
from hurtle.serving import heap

class Cycle:
    def __init__(self):
        self.me = self

def lost():
    return weakref.ref(Cycle())

def frozen(found):
    gc.freeze()
    return found

if sys.argv[1] == "ours":
    heap.freeze()
gone = frozen(lost())
assert gc.get_freeze_count()
heap.release()
print(gone() is None, gc.get_freeze_count() > 0)
"""


def test_a_server_frees_what_it_froze(run_python):
    assert run_python(CODE, "ours").stdout.split() == ["True", "True"]


def test_what_others_froze_is_left_alone(run_python):
    assert run_python(CODE, "others").stdout.split() == ["False", "True"]
