"""For the few tests that measure time: a busy machine may fail one try, a fault fails all of them."""

import functools

TRIES = 5


def repeated(test):
    """Run a test again if it fails, up to five times in all."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        for _ in range(TRIES - 1):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                pass
        return test(*args, **kwargs)

    return run
