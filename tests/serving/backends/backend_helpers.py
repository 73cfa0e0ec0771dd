"""What the tests of the backends share: opening them, requests, and running them as the server does."""

import numpy as np

from hurtle.errors import ServingError
from hurtle.serving.backends.registry import backend_for
from hurtle.serving.lanes import Job, run_jobs
from hurtle.serving.messages import InferRequest


def open_backend(path, **parameters):
    return backend_for(path, parameters)(path, parameters)


def request(**inputs):
    return InferRequest("m", {name.replace("__", "."): np.asarray(value) for name, value in inputs.items()})


def unaligned(array):
    """The same values, read-only and at an odd address, as they may lie in a message."""
    content = b"x" + array.tobytes()
    found = np.frombuffer(memoryview(content)[1:], array.dtype).reshape(array.shape)
    assert not found.flags.writeable
    return found


def run_as_server(backend, requests):
    """Results as an executor gives them: when a fused call fails, each request runs alone."""
    jobs = [Job(each, lambda job: None) for each in requests]
    run_jobs(backend, jobs)
    return [job.result for job in jobs]


def assert_fused_is_single(backend, requests, tolerance=0.0):
    """One call for all gives what a call for each gives."""
    fused = backend.infer_batch(requests)
    assert len(fused) == len(requests)
    for found, each in zip(fused, requests, strict=True):
        alone = backend.infer(each)
        assert found.keys() == alone.keys()
        for name, array in alone.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


def assert_only_fails(results, bad, reason="invalid_argument", words=""):
    for n, result in enumerate(results):
        if n == bad:
            assert isinstance(result, ServingError), result
            assert result.reason == reason
            assert words in str(result)
        else:
            assert isinstance(result, dict), result


def assert_phases_are_measured(backend, requests):
    """Inputs and outputs take time of every call, fused or not, and no more than the call does."""
    backend.infer(requests[0])  # as a warm-up, which must not count
    for together in (requests, requests[:1]):
        jobs = [Job(each, lambda job: None) for each in together]
        run_jobs(backend, jobs)
        assert all(isinstance(job.result, dict) for job in jobs)
        assert {job.phases for job in jobs} == {jobs[0].phases}
        assert all(spent > 0 for spent in jobs[0].phases)
        assert sum(jobs[0].phases) <= jobs[0].finished - jobs[0].started
