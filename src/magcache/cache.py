"""The cache of one transformer: decides once per call whether the stack is walked."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from magcache import compat
from magcache.calibration import Measurement, Measurements
from magcache.clock import Clock, Moment
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve
from magcache.guard import DriftGuard
from magcache.planner import Planner, Schedule
from magcache.residual import ResidualMisfitError
from magcache.sharding import blocks_communicate, whole
from magcache.sketch import Sketcher
from magcache.stack import Stack, Walked
from magcache.standin import Call, Key
from magcache.state import MagCacheState, Streams

__all__ = ["MeasuredListener", "StreamStats", "TransformerCache"]

logger = logging.getLogger("magcache")

Forward = Callable[..., Any]
# Told of each calibration run with its streams' measurements; none if it was aborted or too short.
MeasuredListener = Callable[["TransformerCache", dict[str, Measurements]], None]
RunListener = Callable[["TransformerCache"], None]


@dataclass(frozen=True)
class StreamStats:
    """What one stream did in a run.

    `plan` and `happened` are rows of C (computed), . (skipped) and - (not called). `fallbacks`
    counts, by reason, steps that were computed although the plan skips them.
    """

    transformer: str
    stream: str
    plan: str
    happened: str
    fallbacks: dict[str, int]

    @property
    def computed(self) -> int:
        return self.happened.count("C")

    @property
    def skipped(self) -> int:
        return self.happened.count(".")

    @property
    def steps(self) -> int:
        """Steps at which the stream was called."""
        return self.computed + self.skipped

    @property
    def as_planned(self) -> bool:
        """Whether every step at which the stream was called went as planned."""
        pairs = zip(self.happened, self.plan, strict=True)
        return all(happened in ("-", planned) for happened, planned in pairs)


class TransformerCache:
    """The cache of one transformer: its stack, its streams and what they did."""

    def __init__(
        self,
        module: nn.Module,
        config: MagCacheConfig,
        stack: Stack,
        clock: Clock,
        curve: MagnitudeCurve | None,
        on_measured: MeasuredListener | None = None,
        name: str = "transformer",
    ) -> None:
        self.module = module
        self.name = name
        self.config = config
        self.stack = stack
        self.clock = clock
        self._planner: Planner | None = None
        self.curve = curve
        self.on_measured = on_measured
        # Told before each run's first call; may give another curve.
        self.on_run: RunListener | None = None
        self.states: dict[str, MagCacheState] = {}
        self.last_run: tuple[StreamStats, ...] = ()
        # Calls outside any stream that had to be computed, by reason.
        self.unplaced: Counter[str] = Counter()
        # Shape of the last measured residual, for the curve's provenance.
        self.residual_shape: tuple[int, ...] = ()
        self.alive = True
        self._streams = Streams()
        self._measuring: dict[str, Measurements] = {}
        self._sketcher = Sketcher()
        self._start = 0
        guarded = config.budget is not None and config.budget.drift_guard
        self._guard = DriftGuard() if guarded else None
        self._context: Any = None
        self._said: set[str] = set()
        self._signature = list(inspect.signature(type(stack.module).forward).parameters)[1:]
        self._timestep_name = _timestep_name(self._signature)
        positions = {name: i for i, name in enumerate(self._signature)}
        self._timestep_at = positions.get(self._timestep_name, sys.maxsize)
        clock.on_end.append(self._end_run)

    @property
    def curve(self) -> MagnitudeCurve | None:
        """What plans are made from; None until it has been measured."""
        return self._planner.curve if self._planner else None

    @curve.setter
    def curve(self, curve: MagnitudeCurve | None) -> None:
        self._planner = Planner(self.config, curve) if curve is not None else None

    @property
    def calibrating(self) -> bool:
        """Whether steps are measured instead of skipped."""
        return self.config.mag_calibrate or self.curve is None

    def stats(self) -> tuple[StreamStats, ...]:
        """What each stream does in the run that is on, or did in the last one."""
        return self._stats() if self.states else self.last_run

    def call(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call of the transformer, with its blocks or without."""
        call = Call(args, kwargs)
        if torch.is_grad_enabled():
            # A residual would keep the graph alive, and a second backward would fail.
            self._unplaced("gradients are enabled; use torch.no_grad() to cache")
            return forward(*args, **kwargs)
        try:
            output = self._place(forward, call)
        except BaseException:
            self.clock.abort()
            raise
        self.clock.called()
        return output

    def _place(self, forward: Forward, call: Call) -> Any:
        moment = self.clock.read(self._timestep(call), self._context)
        if moment is None:
            self._unplaced("no run is on that would tell the step; see magcache.enable")
            return forward(*call.args, **call.kwargs)
        context = getattr(self._context, "name", None)
        if self._streams.repeats(moment, context):
            moment = self.clock.catch_up(self._timestep(call)) or moment
        name = self._streams.name(moment, context, call, self._carried)
        if name is None:
            self._unplaced("the scheduler does not step; enable the pipeline that is run")
            return forward(*call.args, **call.kwargs)
        state = self.states.get(name)
        if state is None:
            if not self.states:
                compat.refuse_other_cache(self.stack.module)
                if self.on_run is not None:
                    self.on_run(self)
                if self._guard is not None and blocks_communicate(self.stack.module):
                    self._guard = None
                    self._warn(
                        "the drift guard is off: ranks that wait for each other would differ"
                    )
                self._start = moment.step
            state = self.states[name] = self._new_state(name, moment)
        return self._step(forward, call, state, moment.step)

    def _step(self, forward: Forward, call: Call, state: MagCacheState, step: int) -> Any:
        if self._guard is not None and not state.tightened and self._guard.look():
            self._tighten(state, step)
        if state.plan is not None and not state.plan.computed[step]:
            reason = "residual is missing or older than planned"
            residual = None if state.stale(step) else state.residual_of(step)
            if residual is not None:
                try:
                    output = self.stack.step_over(forward, call, residual)
                except ResidualMisfitError as misfit:
                    reason = f"residual does not fit: {misfit}"
                else:
                    self._note(state, step, computed=False)
                    return output
            self._fall_back(state, step, reason)
        state.make_room()
        walked = self.stack.walk(forward, call)
        if self.calibrating:
            self._measure(state, step, walked)
        if walked.parts is None:
            state.held.clear()
            self._warn("the blocks leave the output unchanged; there is no residual to reuse")
        else:
            # A measurement compares residuals, and must not see what storing costs.
            storage = "device" if self.calibrating else self.config.residual_storage
            state.hold(step, walked.parts, storage)
            if self._guard is not None and state.schedule is not None:
                assert self._planner is not None
                own = self._planner.own_reuse(state.timeline, state.stream, state.order)
                self._guard.computed(state.stream, state.schedule, own, step, walked.parts)
        self._note(state, step, computed=True)
        return walked.output

    def _new_state(self, name: str, moment: Moment) -> MagCacheState:
        state = MagCacheState(name, len(self.states), moment.timeline, None)
        if not self.calibrating:
            if moment.step > self._start:
                state.breaks.add(moment.step)
            state.schedule = self._schedule(state)
            plan = state.schedule.plan
            state.planned = "-" * moment.step + str(plan)[moment.step :]
            if not plan.skipped_steps and (self.config.budget or self.config.threshold > 0):
                self._say(f"the plan skips none of {plan.steps} steps: nothing to gain")
        return state

    def _schedule(self, state: MagCacheState) -> Schedule:
        assert self._planner is not None
        return self._planner.schedule(
            state.timeline, state.stream, state.order, self._start, state.breaks
        )

    def _tighten(self, state: MagCacheState, step: int) -> None:
        state.tightened = True
        if state.schedule is not None:
            state.schedule = state.schedule.tightened(step - 1)
            row = str(state.plan)
            state.planned = state.planned[:step] + row[step:]
            self._say("a prompt is reused less well than calibrated: fewer steps are skipped")

    def _fall_back(self, state: MagCacheState, step: int, reason: str) -> None:
        state.fallbacks[reason] += 1
        state.breaks.add(step)
        state.schedule = self._schedule(state)
        if state.tightened:
            state.schedule = state.schedule.tightened(step)
        message = f"stream {state.stream}, step {step} is computed, not skipped: {reason}"
        self._warn(message, once=f"{state.stream}: {reason}")

    def _measure(self, state: MagCacheState, step: int, walked: Walked) -> None:
        measured = self._measuring.setdefault(state.stream, Measurements(state.timeline))
        if walked.parts is None:
            return
        now = tuple(map(whole, walked.parts.tensors))
        self.residual_shape = tuple(now[0].shape)
        metrics = None
        if state.held and measured.taken:
            before = tuple(map(whole, state.held[-1][1].load().tensors))
            if [t.shape for t in now] == [t.shape for t in before]:
                moved = tuple(t.to(now[0].device) for t in before)
                metrics = self.stack.strategy.compute_calibration_metrics(now, moved)
        sketch = self._sketcher.sketch(now)
        scale = self._sketcher.scale(tuple(map(whole, walked.values)))
        measured.taken.append(Measurement(step, metrics, sketch, scale))

    def _note(self, state: MagCacheState, step: int, *, computed: bool) -> None:
        state.note(step, computed=computed)
        if logger.isEnabledFor(logging.DEBUG):
            ratio = state.plan.ratios[step] if state.plan else 1.0
            error = state.plan.errors[step] if state.plan else 0.0
            logger.debug(
                "%s stream %s step %d/%d %s error %.4f ratio %.4f skipped %d",
                self.name,
                state.stream,
                step,
                state.timeline.steps,
                "miss (computed)" if computed else "hit (skipped)",
                error,
                ratio,
                state.happened.count("."),
            )

    def _stats(self) -> tuple[StreamStats, ...]:
        return tuple(
            StreamStats(self.name, s.stream, s.planned, s.row, dict(s.fallbacks))
            for s in self.states.values()
        )

    def _end_run(self, complete: bool) -> None:
        """Forget the run; hand its measurements on if it went to its end."""
        calibrated = bool(self.states) and self.calibrating
        if self.states:
            self.last_run = self._stats()
        self.states.clear()
        self._streams.clear()
        if self._guard is not None:
            self._guard.clear()
        measured = {name: m for name, m in self._measuring.items() if len(m.taken) > 1}
        self._measuring = {}
        if calibrated and self.on_measured is not None:
            self.on_measured(self, measured if complete else {})

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a cached module has no cache."""

    def close(self) -> None:
        """Let go of everything; calls that still arrive pass straight through."""
        self.alive = False
        self._end_run(complete=False)
        self.clock.on_end.remove(self._end_run)

    def _carried(self, call: Call) -> dict[str, Key]:
        """Where the call has its tensors, by name, without those that are new at every step."""
        names = self._signature
        named = {
            names[k] if isinstance(k, int) and k < len(names) else str(k): k for k in call.tensors()
        }
        for varying in (*names[:1], self._timestep_name):
            named.pop(varying, None)
        return named

    def _timestep(self, call: Call) -> Any:
        if len(call.args) > self._timestep_at:
            return call.args[self._timestep_at]
        return call.kwargs.get(self._timestep_name)

    def _unplaced(self, reason: str) -> None:
        self.unplaced[reason] += 1
        self._warn(f"a call is computed plainly: {reason}")

    def _warn(self, message: str, once: str | None = None) -> None:
        self._say(message, logging.WARNING, once)

    def _say(self, message: str, level: int = logging.INFO, once: str | None = None) -> None:
        """Say a thing once, however often it happens: stats count it. `once` tells what is one."""
        if (once or message) not in self._said:
            self._said.add(once or message)
            logger.log(level, "%s: %s", self.name, message)

    @contextlib.contextmanager
    def in_context(self, context: Any) -> Iterator[None]:
        """While this is open, calls belong to this cache context."""
        before, self._context = self._context, context
        try:
            yield
        finally:
            self._context = before


def _timestep_name(arguments: list[str]) -> str:
    """The argument that takes the timestep: by its usual names, else the first that sounds so."""
    exact = [name for name in ("timestep", "timesteps", "t", "sigma") if name in arguments]
    alike = [name for word in ("timestep", "time") for name in arguments if word in name]
    return next(iter(exact + alike), "timestep")
