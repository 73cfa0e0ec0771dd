"""GPU kernels in Triton, each fusing a hot spot, beside its torch reference.

Modules here import triton, which comes with torch's GPU builds; check `has_triton()` first.
"""

from functools import cache


@cache
def has_triton() -> bool:
    """Whether triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
