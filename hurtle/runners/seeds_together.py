"""`SeedsTogether`: the loop of many seeds that train side by side: one collector, one learner, a run folder for each.

starts → parts (seeds_assembly.py) → collect, learn, all seeds at once → each seed's folder (seed_record.py). What happens to a
seed is told as it happens: it is left for another turn, has ended, has failed. Knows nothing of how an update is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hurtle.contracts import Metrics
from hurtle.deploy.restore import load_weights
from hurtle.errors import CheckpointError, HurtleError, NonFiniteError
from hurtle.runners.assembly import run_seed
from hurtle.runners.devices import gpu_errors, own_random_streams, torch_settings
from hurtle.runners.saving import load_policy, next_multiple
from hurtle.runners.seed_record import Clock, SavedWhole, SeedParts, SeedRecord, SeedStart
from hurtle.runners.seeds_assembly import SeedsParts, assemble_seeds
from hurtle.runners.signals import StopSignals
from hurtle.tracking.checkpoints import Checkpoints, is_whole, load_checkpoint

REPORTS = 1_000
"""Lines of metrics for each seed, at most: writing some for all seeds after every update would take longer than the update."""
Tell = Callable[[str, int, str], None]
"""Called with "left", "ended" or "failed", the seed, and the reason."""


class SeedsTogether:
    """Trains seeds side by side; off-policy, as many as there is memory for their replay.

    Args:
        starts: The seeds; all of them begin anew, or go on from checkpoints after equally many steps.
        tell: Learns what happens to each.

    Raises:
        HurtleError: They cannot be trained side by side; says why.

    Attributes:
        clock: Steps of each seed, updates and seconds so far.
        parts: What trains.
    """

    def __init__(self, starts: Sequence[SeedStart], tell: Tell):
        self._starts, self._tell = list(starts), tell
        self.settings = self._starts[0].settings
        self.clock, self._stopped_by, self._evaluating = Clock(), "", False
        self._seconds_before, self._began = 0.0, time.perf_counter()
        self._rng: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._common: dict[str, float] = {}  # metrics that are the same for all seeds
        self._reported = -1
        self.records: list[SeedRecord] = []
        self._reached: list[SeedRecord] = []  # seeds that have reached the return to stop at
        with gpu_errors():
            self.parts: SeedsParts = assemble_seeds(self.settings, [start.settings.train.seed for start in starts])
        for start in self._starts[len(self.parts.seeds) :]:
            tell("left", start.settings.train.seed, "")
        self._starts = self._starts[: len(self.parts.seeds)]

    @property
    def active(self) -> list[SeedRecord]:
        """The seeds that are still recorded."""
        return [record for record in self.records if not record.is_over]

    def run(self) -> None:
        """Train until all are done or a stop is requested; save, evaluate."""
        train, device = self.settings.train, self.parts.device
        try:
            with torch_settings(train.threads, train.precision, device), StopSignals(self._ask), gpu_errors(str(device)):
                self._prepare()
                try:
                    self._loop()
                except Exception as error:
                    self._save_after(error)
                    raise
                self._end(self.active, self._stopped_by or "total_steps")
        finally:
            for record in self.active:
                record.close()
            self.parts.close()

    # Before the first update.

    def _prepare(self) -> None:
        """Build what learning needs, and continue from checkpoints."""
        parts, train = self.parts, self.settings.train
        for policy in parts.policies if train.fine_tune and self._starts[0].file is None else ():
            load_policy(policy, train.fine_tune)
        with own_random_streams(parts.device):
            parts.collector.prepare(parts.rollout)
            parts.learner.prepare(parts.rollout)
            progress = self._restore()
        for start, policy, saved in zip(self._starts, parts.policies, progress, strict=True):
            record = SeedRecord(start, SeedParts(policy), parts.spaces, self.clock)
            record.open(saved)
            self.records.append(record)
        rng = self._rng
        if rng is None:
            torch.manual_seed(run_seed(train.seed))
        else:
            torch.set_rng_state(rng[0])
            if rng[1] is not None and parts.device.type == "cuda":
                torch.cuda.set_rng_state(rng[1], parts.device)
        parts.timer.shares()
        self._began = time.perf_counter()
        self._next_report, self._next_evaluation = 0, next_multiple(self.clock.steps, train.eval_every)
        for record in self.records:
            record.begin()

    def _restore(self) -> list[Any]:
        """Load the checkpoints, one after the other: replay buffers are large. Returns the progress of each seed."""
        if self._starts[0].file is None:
            return [None] * len(self._starts)
        progress: list[Any] = []
        collectors: list[Any] = []

        def learners() -> Iterator[dict[str, Any]]:
            for start, policy in zip(self._starts, self.parts.policies, strict=True):
                assert start.file is not None
                saved = load_checkpoint(start.file)
                load_weights(policy, saved["policy"], start.file)
                self._rng = self._rng or (saved["torch_rng"], saved.get("gpu_rng"))
                progress.append(saved["progress"])
                collectors.append(saved["collector"])
                yield saved["learner"]

        self.parts.learner.load_states(learners())
        self.parts.collector.load_states(collectors)
        self.clock.steps, self.clock.updates = progress[0]["steps"], progress[0]["updates"]
        self._seconds_before = self.clock.seconds = max(each["seconds"] for each in progress)
        return progress

    # The loop.

    def _loop(self) -> None:
        train, clock = self.settings.train, self.clock
        while clock.steps < train.total_steps and not self._stopped_by and self.active:
            if not self._update():
                break
            if clock.steps >= self._next_report:
                self._report()
            if self._stopped_by:
                break
            if train.eval_every and clock.steps >= self._next_evaluation:
                self._next_evaluation = next_multiple(clock.steps, train.eval_every)
                self._evaluate_all()
            if any(record.saver.is_due(clock.steps) for record in self.active):
                self._save([(record, record.saver.save_and_wait) for record in self.active])

    def _update(self) -> bool:
        """One rollout of all seeds, and one update from it; returns whether it was complete."""
        parts, clock, train = self.parts, self.clock, self.settings.train
        if parts.collector.collect(parts.rollout) is None:
            return False
        self._take_news()
        with parts.timer("learn"):
            self._learn(lambda: parts.learner.update(parts.rollout, min(1.0, clock.steps / train.total_steps)))
        clock.steps += parts.rollout.num_valid // len(parts.seeds)
        clock.updates += 1
        clock.seconds = self._seconds_before + time.perf_counter() - self._began
        if reached := [record for record in self._reached if not record.is_over]:
            self._end(reached, "stop_at_return")
        return True

    def _take_news(self) -> None:
        """Record the episodes that the collector reports, and the seeds that it has found to have failed."""
        goal = self.settings.train.stop_at_return
        for place, error in self.parts.collector.take_failures().items():
            self._fail(place, error)
        for place, episodes in self.parts.collector.take_episodes().items():
            record = self.records[place]
            if record.is_over:
                continue
            window = record.episodes
            window.add(episodes)
            if goal is not None and window.count >= window.size and window.mean_return >= goal:
                self._reached.append(record)

    def _settle(self) -> None:
        """Take in what a GPU has not reported yet: its numbers arrive an update or two late."""
        self.parts.collector.pending(wait=True)
        self._take_news()
        self._learn(lambda: self.parts.learner.pending(wait=True))

    def _learn(self, update: Callable[[], Metrics]) -> None:
        """Update, and end the seeds whose losses are not finite."""
        try:
            found = update()
        except NonFiniteError:
            self._drop_diverged()
            if self.active:  # it was not a loss
                raise
            return
        self._common |= {name: found[name] for name in ("replay", "epsilon") if name in found}  # not in each seed's metrics
        if "diverged" in found:
            self._drop_diverged()

    def _drop_diverged(self) -> None:
        for place, error in enumerate(self.parts.learner.failures()):
            if error is not None:
                self._fail(place, error)

    def _fail(self, place: int, error: HurtleError) -> None:
        self.parts.learner.leave(place)
        record = self.records[place]
        if not record.is_over:
            self._tell("failed", record.seed, record.fail(error))

    def _report(self) -> None:
        """Write each seed's metrics: its own losses and episodes, the shares of time of all."""
        parts, train = self.parts, self.settings.train
        every = -(-train.total_steps // REPORTS)
        self._reported, self._next_report = self.clock.steps, next_multiple(self.clock.steps, every)
        if on_gpu := {**parts.collector.seconds(), **parts.learner.seconds()}:
            parts.timer.share_out(on_gpu)
        shares = parts.timer.shares()
        own = parts.learner.seed_metrics or [{}] * len(self.records)
        for place, (record, metrics) in enumerate(zip(self.records, own, strict=True)):
            if not record.is_over:
                record.report({**self._common, **metrics}, parts.collector.metrics_of(place), shares)

    def _evaluate_all(self) -> None:
        self._take_states(self.active)
        for record in self.active:
            if self._stopped_by:
                return
            self._evaluate(record)

    def _evaluate(self, record: SeedRecord) -> Any:
        """Evaluate one seed; None if that fails or a stop was requested."""
        self._evaluating = True
        try:
            with own_random_streams(self.parts.device):
                return record.evaluate()
        except KeyboardInterrupt:
            return None
        finally:
            self._evaluating = False

    # Saving and the end.

    def _save(self, saves: Sequence[tuple[SeedRecord, Callable[[int], Any]]]) -> None:
        """Save some seeds, each with its own function; one whose folder cannot be written fails alone."""
        self._take_states([record for record, _ in saves])
        for record, save in saves:
            if record.is_over:  # it has just turned out to have failed
                continue
            try:
                save(self.clock.steps)
            except CheckpointError as error:
                self._tell("failed", record.seed, record.fail(error))

    def _take_states(self, records: Sequence[SeedRecord], with_envs: bool = True) -> None:
        """Make the states of these seeds ready to be saved. Replay is copied when its seed is saved, one at a time."""
        if with_envs:
            self._settle()
        states = self.parts.collector.states(with_envs)
        for k, record in enumerate(self.records):
            if record in records:
                record.parts.learner = SavedWhole(lambda k=k: self.parts.learner.state_of(k))  # type: ignore[misc]
                record.parts.collector = SavedWhole(lambda state=states[k]: state)  # type: ignore[misc]

    def _end(self, records: Sequence[SeedRecord], stopped_by: str) -> None:
        """Save these seeds, evaluate them unless the user stops, and write their summaries."""
        self._settle()
        if self._reported != self.clock.steps:
            self._report()
        self._save([(record, record.saver.save) for record in records if not record.is_over])
        for record in records:
            if record.is_over:
                continue
            found = None if self._stopped_by else self._evaluate(record)
            record.finish(self._stopped_by or ("stop_at_return" if record in self._reached else stopped_by), found)
            self._tell("ended", record.seed, "")

    def _save_after(self, error: Exception) -> None:
        """After an error, save everything but the envs, unless this step was saved with them, and name the checkpoint."""
        if not getattr(error, "device_lost", False):
            self._take_states(self.active, with_envs=False)
            for record in self.active:
                record.saver.save_after_error(self.clock.steps)
        if isinstance(error, HurtleError) and self.active:
            self.active[0].saver.name_last_checkpoint(error)

    def _ask(self, why: str) -> None:
        self._stopped_by = why
        if self._evaluating:  # it is safe to stop midway
            raise KeyboardInterrupt
        if not self.parts.collector.resumes_exactly:
            self.parts.collector.request_stop()


def grouped(folders: Sequence[Path | None]) -> list[list[tuple[int, Path | None]]]:
    """Which seeds can go on together, by their place in `folders`, with their checkpoints: those after equally many steps.

    A seed goes on from its newest checkpoint, or from the one before where that is what all have: a crash while they were
    saved. Those without a folder begin anew. The largest group comes first.
    """
    newest = [[] if path is None else _newest_two(path) for path in folders]
    steps = [{file.stem for file in files} for files in newest if files]
    common = max(set.intersection(*steps), default="") if steps else ""
    groups: dict[str, list[tuple[int, Path | None]]] = {}
    for k, files in enumerate(newest):
        file = next((file for file in files if file.stem == common or not common), None)
        groups.setdefault("" if file is None else file.stem, []).append((k, file))
    return sorted(groups.values(), key=len, reverse=True)


def _newest_two(folder: Path) -> list[Path]:
    """The two newest checkpoints that are whole, the newest one first."""
    whole = (file for file in reversed(Checkpoints(folder / "checkpoints").all()) if is_whole(file))
    return list(islice(whole, 2))
