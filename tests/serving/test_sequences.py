"""Sequences: state on the server, in order, bounded, forgotten in time, and kept through a change of versions."""

import asyncio
import time

import numpy as np
import pytest
from serving_helpers import Answers, Counter, make_model, run

from hurtle.errors import ServingError
from hurtle.serving.backends.base import Metadata, TensorSpec
from hurtle.serving.messages import InferRequest
from hurtle.serving.sequences import Sequences


def step(x, sequence=1, start=False, end=False, rows=1, **fields):
    parameters = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
    return InferRequest("m", {"x": np.full((rows, 1), x, np.float32)}, parameters=parameters, **fields)


def totals(answers):
    return [float(answer.outputs["total"][0, 0]) for answer in answers]


@pytest.mark.parametrize("executor", ["inline", "worker", "batch"])
def test_a_sequence_goes_on_from_its_own_state(executor):
    async def main():
        model, sequences, answers = make_model(Counter, executor=executor), Sequences(10, 60), Answers()
        sequences.infer(model, step(1, "a", start=True), answers.append)
        sequences.infer(model, step(10, 2, start=True), answers.append)
        for n in range(3):
            sequences.infer(model, step(1, "a"), answers.append)
            sequences.infer(model, step(10, 2, end=n == 2), answers.append)
        await answers.wait(8)
        mine = [answer for answer in answers if answer.parameters["sequence_id"] == "a"]
        assert totals(mine) == [1, 2, 3, 4]
        assert totals(answer for answer in answers if answer not in mine) == [10, 20, 30, 40]
        assert all(list(answer.outputs) == ["total"] for answer in answers)  # the state stays here
        assert len(sequences) == 1  # 2 has ended
        sequences.infer(model, step(5, "a", start=True), answers.append)  # begins anew
        await answers.wait(9)
        assert totals(answers[-1:]) == [5]
        model.close()

    run(main())


def test_requests_of_a_sequence_run_in_order_though_many_lanes_are_free():
    async def main():
        model, sequences, answers = make_model(Counter, executor="worker", lanes=4), Sequences(10, 60), Answers()
        for n in range(50):
            sequences.infer(model, step(1, start=n == 0, id=str(n)), answers.append)
        await answers.wait(50)
        assert totals(answers) == list(range(1, 51))
        assert [answer.id for answer in answers] == [str(n) for n in range(50)]
        model.close()

    run(main())


def test_outputs_that_were_asked_for_may_be_the_state():
    async def main():
        model, sequences, answers = make_model(Counter, executor="inline"), Sequences(10, 60), Answers()
        sequences.infer(model, step(1, start=True, outputs=("state_out_0",)), answers.append)
        assert list(answers[0].outputs) == ["state_out_0"]
        sequences.infer(model, step(1, outputs=("total",)), answers.append)
        assert (list(answers[1].outputs), totals(answers[1:])) == (["total"], [2])

    run(main())


def test_what_cannot_be_continued_is_refused():
    async def main():
        model, sequences = make_model(Counter, executor="inline"), Sequences(2, 60)
        answers = Answers()

        def refused(request, reason, said):
            with pytest.raises(ServingError, match=said) as caught:
                sequences.infer(model, request, answers.append)
            assert caught.value.reason == reason

        refused(step(1, 5), "invalid_argument", "no sequence 5: its first request must set sequence_start")
        refused(step(1, 1.5, start=True), "invalid_argument", "sequence_id must be")
        refused(step(1, "a" * 300, start=True), "invalid_argument", "sequence_id must be")
        refused(step(1, 1, start="yes"), "invalid_argument", "sequence_start must be a bool")
        sequences.infer(model, step(1, 1, start=True), answers.append)
        sequences.infer(model, step(1, 2, start=True), answers.append)
        refused(step(1, 3, start=True), "resource_exhausted", "2 sequences already")
        sequences.infer(model, step(1, 1, rows=2), answers.append)
        assert "a batch of 1, got 2" in str(answers[-1])
        huge = step(1, 1)
        huge.inputs["x"] = np.broadcast_to(np.float32(0), (2**40, 1, 1))
        sequences.infer(model, huge, answers.append)
        assert "expected shape [-1, 1]" in str(answers[-1])
        both = step(1, 1)
        both.inputs["state_in_0"] = np.zeros((1, 1), np.float32)
        sequences.infer(model, both, answers.append)
        assert "'state_in_0' is the state" in str(answers[-1])
        sequences.infer(model, step(1, 1, end=True), answers.append)
        sequences.infer(model, step(1, 3, start=True), answers.append)
        assert totals(answers[-2:]) == [2, 1]

    run(main())


def test_a_start_that_fails_leaves_nothing_and_a_step_that_fails_keeps_the_state():
    async def main():
        model, sequences, answers = make_model(Counter, executor="inline"), Sequences(10, 60), Answers()
        sequences.infer(model, step(2000, start=True), answers.append)
        assert answers[0].reason == "invalid_argument"
        assert len(sequences) == 0
        sequences.infer(model, step(3, start=True), answers.append)
        sequences.infer(model, step(2000), answers.append)
        sequences.infer(model, step(4), answers.append)
        assert totals([answers[1], answers[3]]) == [3, 7]

    run(main())


def test_idle_sequences_are_forgotten():
    async def main():
        ended = []
        model, sequences = make_model(Counter, executor="inline"), Sequences(10, 0.05, ended.append)
        answers = Answers()
        sequences.infer(model, step(1, 1, start=True), answers.append)
        await asyncio.sleep(0.03)
        sequences.infer(model, step(1, 2, start=True), answers.append)
        await asyncio.sleep(0.03)
        sequences.forget_idle()
        assert (len(sequences), ended) == (1, [model])
        with pytest.raises(ServingError, match="dropped after"):
            sequences.infer(model, step(1, 1), answers.append)
        sequences.infer(model, step(1, 2), answers.append)
        assert totals(answers) == [1, 1, 2]
        assert sequences.uses(model)
        time.sleep(0.06)
        sequences.forget_idle()
        assert not sequences.uses(model)

    run(main())


def test_a_sequence_stays_with_the_version_it_began_with():
    async def main():
        old, new = make_model(Counter, "1", executor="inline"), make_model(Counter, "2", executor="inline")
        sequences, answers = Sequences(10, 60), Answers()
        sequences.infer(old, step(1, start=True), answers.append)
        assert sequences.find(step(1)) is old
        assert sequences.find(step(1, start=True)) is None
        assert sequences.find(step(1, 9)) is None
        sequences.infer(sequences.find(step(1)), step(1), answers.append)
        sequences.infer(new, step(1, start=True), answers.append)
        assert [answer.version for answer in answers] == ["1", "1", "2"]
        assert totals(answers) == [1, 2, 1]
        assert not sequences.uses(old)

    run(main())


def test_cancelled_requests_are_not_answered_and_do_not_stop_the_sequence():
    async def main():
        model, sequences, answers = make_model(Counter, executor="worker", lanes=1), Sequences(10, 60), Answers()
        first = sequences.infer(model, step(1, start=True), answers.append)
        second = sequences.infer(model, step(10), answers.append)
        sequences.infer(model, step(100), answers.append)
        first.cancel()
        second.cancel()
        await answers.wait(1)
        assert totals(answers) == [101]  # what ran counts, what never began does not
        model.close()

    run(main())


def test_an_id_may_be_used_again_at_once():
    async def main():
        model, sequences, answers = make_model(Counter, executor="worker", lanes=1), Sequences(10, 60), Answers()
        for x, start, end in ((1, True, False), (2, False, True), (5, True, False), (6, False, False)):
            sequences.infer(model, step(x, start=start, end=end), answers.append)
        await answers.wait(4)
        assert totals(answers) == [1, 3, 5, 11]
        sequences.infer(model, step(7, end=True), answers.append)
        sequences.infer(model, step(8), answers.append)
        await answers.wait(6)
        assert totals(answers[4:5]) == [18]
        assert "has no sequence" in str(answers[5])
        assert len(sequences) == 0
        model.close()

    run(main())


def test_what_waits_behind_a_start_that_fails_is_refused():
    async def main():
        model, sequences, answers = make_model(Counter, executor="worker", lanes=1), Sequences(10, 60), Answers()
        sequences.infer(model, step(2000, start=True), answers.append)
        sequences.infer(model, step(1), answers.append)
        await answers.wait(2)
        assert "too large" in str(answers[0])
        assert "has no sequence" in str(answers[1])
        assert len(sequences) == 0
        model.close()

    run(main())


def test_state_that_the_server_cannot_make_is_refused():
    class Layered(Counter):
        def metadata(self):
            found = super().metadata()
            return Metadata(
                (found.inputs[0], TensorSpec("state_in_0", "FP32", (2, -1, 1))),
                found.outputs,
                "x",
                state=found.state,
                batched=False,
            )

        def infer(self, request):
            return {"total": request.inputs["x"], "state_out_0": request.inputs["x"]}

    async def main():
        model, sequences, answers = make_model(Layered, executor="inline"), Sequences(10, 60), Answers()
        for _ in range(2):
            sequences.infer(model, step(1, start=True), answers.append)
        assert [answer.reason for answer in answers] == ["failed_precondition"] * 2
        assert "send it as a tensor" in str(answers[0])

    run(main())


def test_states_have_a_bound_in_bytes_together():
    async def main():
        model, sequences, answers = make_model(Counter, executor="inline"), Sequences(100, 60, max_bytes=40), Answers()
        for n, rows in enumerate((4, 5)):  # of four bytes each
            sequences.infer(model, step(1, f"s{n}", start=True, rows=rows), answers.append)
        assert sequences.held == 36
        sequences.infer(model, step(1, "new", start=True, rows=2), answers.append)
        assert answers[2].reason == "resource_exhausted"
        assert "36 bytes of at most 40" in str(answers[2])
        assert len(sequences) == 2
        sequences.infer(model, step(1, "s0", rows=4), answers.append)  # what is there goes on
        sequences.infer(model, step(1, "s1", start=True, rows=6), answers.append)  # and may begin anew
        assert totals(answers[3:]) == [2, 1]
        assert sequences.held == 40
        sequences.infer(model, step(1, "s0", end=True, rows=4), answers.append)
        assert sequences.held == 24
        sequences.infer(model, step(2000, "s1", start=True), answers.append)  # a start that fails leaves nothing
        assert sequences.held == 0
        sequences.infer(model, step(1, "new", start=True, rows=10), answers.append)
        sequences.forget(model)
        assert (len(sequences), sequences.held) == (0, 0)

    run(main())


def test_the_state_of_a_sequence_that_is_forgotten_while_it_runs_does_not_count():
    async def main():
        model, sequences, answers = make_model(Counter, executor="worker", lanes=1), Sequences(100, 60), Answers()
        sequences.infer(model, step(1, start=True), answers.append)
        sequences.forget(model)
        await answers.wait(1)
        assert (totals(answers), sequences.held) == ([1], 0)
        model.close()

    run(main())


def test_models_without_memory_have_no_sequences():
    async def main():
        with pytest.raises(ServingError, match="has no state"):
            Sequences(10, 60).infer(make_model(executor="inline"), step(1, start=True), [].append)

    run(main())
