"""GPU kernels in Triton: each fuses what the profile showed, beside the torch code that says what it computes.

Modules here import triton, which comes with torch's GPU builds; look with `has_triton()` first.
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
