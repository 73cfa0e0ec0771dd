"""A small Ray for the tests of one module, of which nothing is left afterwards."""

from collections.abc import Iterator


def small_ray(num_cpus: int) -> Iterator[None]:
    """For a fixture: `yield from small_ray(2)`. Imports Ray late: every test process would load it while it collects tests."""
    import psutil
    import ray

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=num_cpus, object_store_memory=80_000_000, **quiet)
    processes = psutil.Process().children(recursive=True)
    yield
    ray.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
