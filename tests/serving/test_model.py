"""A loaded model: what it refuses and how it says so, what it counts, where it runs."""

import asyncio
import threading

import numpy as np
import pytest
from serving_helpers import Answers, Counter, Doubler, make_model, request, run

from hurtle.errors import HurtleError, ServingError
from hurtle.serving.backends.base import Backend, Metadata, TensorSpec
from hurtle.serving.messages import InferRequest, InferResponse

ONE = np.ones((1, 3), np.float32)


class Two(Backend):
    def metadata(self):
        specs = tuple(TensorSpec(name, "INT32", (-1, -1, 2)) for name in ("left", "right", "extra"))
        return Metadata(specs, (TensorSpec("sum", "INT32", (-1, -1, 2)),), "test_two", optional=frozenset({"extra"}))

    def infer(self, request):
        return {"sum": sum(request.inputs.values())}


def ints(*shape):
    return np.ones(shape, np.int32)


@pytest.mark.parametrize(
    ("backend", "inputs", "outputs", "said"),
    [
        (Doubler, {"z": ONE}, (), "'m' has no input 'z'.* Known: x"),
        (Doubler, {}, (), "'m' needs the input 'x'; got none"),
        (Doubler, {"x": ONE.astype(np.float64)}, (), "Input 'x' of model 'm': expected FP32, got FP64"),
        (Doubler, {"x": ONE[0]}, (), r"expected shape \[-1, 3\] \(-1 is any size\), got \[3\]"),
        (Doubler, {"x": np.ones((2, 4), np.float32)}, (), r"got \[2, 4\]"),
        (Doubler, {"x": ONE}, ("z",), "has no output 'z'.* Known: y"),
        (Two, {"left": ints(1, 1, 2)}, (), "needs the input 'right'; got 'left'"),
        (
            Counter,
            {"x": ONE[:, :1]},
            (),
            "'state_in_0'; got 'x'.* the last 'state_out_0'; or set a sequence_id, with sequence_start",
        ),
        (Two, {"left": ints(1, 1, 2), "right": ints(2, 1, 2)}, (), "Input 'right'.*expected a batch of 1 .* got 2"),
        (Doubler, {"x": np.ones((9, 3), np.float32)}, (), "at most 8 rows in a request, got 9"),
    ],
)
def test_what_is_wrong_is_named(backend, inputs, outputs, said):
    async def main():
        model = make_model(backend, executor="inline", max_rows=8)
        with pytest.raises(ServingError, match=said) as caught:
            model.infer(InferRequest("m", inputs, outputs=outputs), lambda answer: pytest.fail("answered"))
        assert caught.value.reason == "invalid_argument"
        assert model.statistics.snapshot()["reasons"] == {"invalid_argument": 1}
        assert model.active == 0

    run(main())


def test_optional_inputs_may_be_left_out_and_variable_sizes_vary():
    async def main():
        model, answers = make_model(Two, executor="inline"), []
        model.infer(InferRequest("m", {"left": ints(1, 4, 2), "right": ints(1, 4, 2)}), answers.append)
        model.infer(InferRequest("m", {"right": ints(3, 1, 2), "left": ints(3, 1, 2), "extra": ints(3, 1, 2)}), answers.append)
        assert [answer.outputs["sum"].max() for answer in answers] == [2, 3]

    run(main())


@pytest.mark.parametrize("executor", ["inline", "worker", "batch"])
def test_every_executor_answers_with_id_version_and_the_outputs_asked_for(executor):
    async def main():
        model, answers = make_model(executor=executor, version="7"), Answers()
        model.infer(request(2.0, id="a", outputs=("y",)), answers.append)
        await answers.wait(1)
        answer = answers[0]
        assert isinstance(answer, InferResponse)
        assert (answer.model, answer.version, answer.id, list(answer.outputs)) == ("m", "7", "a", ["y"])
        np.testing.assert_array_equal(answer.outputs["y"], np.full((1, 3), 4, np.float32))
        model.close()

    run(main())


def test_batch_runs_quick_models_on_the_event_loop_and_slow_ones_on_a_thread():
    quick, slow = make_model(), make_model(parameters={"delay": 0.01})
    assert (quick.executor.lanes, slow.executor.lanes) == (0, 1)
    slow.close()
    forced = make_model(lanes=2)
    assert forced.executor.lanes == 2
    forced.close()


@pytest.mark.parametrize("options", [{}, {"lanes": 0}])
def test_what_is_larger_than_a_batch_never_runs_on_the_event_loop(options):
    threads = {}

    class Where(Doubler):
        def infer(self, request):
            threads[len(request.inputs["x"])] = threading.current_thread().name
            return super().infer(request)

    async def main():
        model, answers = make_model(Where, executor="batch", batch_size=8, **options), Answers()
        for rows in (9, 8):
            model.infer(request(rows=rows), answers.append)
        await answers.wait(2)
        assert threads[9] != threading.current_thread().name
        assert threads[8] == threading.current_thread().name
        assert model.statistics.snapshot()["succeeded"] == 2
        await asyncio.to_thread(model.close)

    run(main())


def test_what_it_did_is_counted():
    async def main():
        model, answers = make_model(executor="batch", parameters={"delay": 0.02}), Answers()
        for n in range(3):
            model.infer(request(float(n), rows=2), answers.append)
        ticket = model.infer(request(), answers.append)
        assert model.active == 4
        ticket.cancel()
        ticket.cancel()
        await answers.wait(3)
        model.infer(request(-1.0), answers.append)
        await answers.wait(4)
        found = model.statistics.snapshot()
        assert (found["succeeded"], found["rows"], found["executions"], found["cancelled"], found["failed"]) == (3, 6, 3, 1, 1)
        assert found["reasons"] == {"internal": 1}
        assert {rows: count for rows, (count, _) in found["batches"].items()} == {"2": 1, "4": 1, "1": 1}
        assert found["compute_ns"] >= 3 * 0.02e9
        assert sum(found["histograms"]["queue_seconds"]["counts"]) == 3
        assert sum(found["histograms"]["compute_seconds"]["counts"]) == 3
        assert model.active == 0
        model.close()

    run(main())


def test_it_says_when_it_is_idle():
    async def main():
        model, idle, answers = make_model(executor="worker", lanes=1), [], Answers()
        model.on_idle = idle.append
        model.infer(request(), answers.append)
        model.infer(request(), answers.append)
        await answers.wait(2)
        assert idle == [model]
        model.close()
        with pytest.raises(RuntimeError, match="broken transport"):
            make_model(executor="inline").infer(request(), fail)

    def fail(answer):
        raise RuntimeError("broken transport")

    run(main())


def test_a_model_that_cannot_be_run_is_not_loaded():
    class Broken(Doubler):
        def infer(self, request):
            raise RuntimeError("no such operator")

    class Silent(Doubler):
        def infer(self, request):
            return {}

    with pytest.raises(HurtleError, match="RuntimeError: no such operator"):
        make_model(Broken)
    with pytest.raises(HurtleError, match=r"without \['y'\]"):
        make_model(Silent, executor="worker", lanes=1)


def test_outputs_that_are_missing_are_an_error_that_names_them():
    class Leaves(Doubler):
        def infer(self, request):
            return {} if request.inputs["x"].any() else super().infer(request)

    async def main():
        model, answers = make_model(Leaves, executor="worker", lanes=1), Answers()
        model.infer(request(1.0, outputs=("y",)), answers.append)
        model.infer(request(1.0), answers.append)
        model.infer(request(0.0), answers.append)
        await answers.wait(3)
        assert [getattr(answer, "reason", None) for answer in answers] == ["internal", "internal", None]
        assert "without ['y']" in str(answers[0])
        assert model.active == 0
        model.close()

    run(main())


def test_all_that_wait_are_answered_when_a_backend_always_fails():
    class Later(Doubler):
        def infer(self, request):
            if self.calls:
                raise MemoryError("full")
            return super().infer(request)

    async def main():
        model, answers = make_model(Later, executor="worker", lanes=2), Answers()
        for _ in range(10):
            model.infer(request(), answers.append)
        await answers.wait(10)
        assert {answer.reason for answer in answers} == {"internal"}
        await asyncio.sleep(0.01)
        assert model.active == 0
        model.close()

    run(main())
