"""Which step of which run a call belongs to, and how noisy it is there.

The scheduler knows: `set_timesteps` starts a run and tells its length and noise levels, `step` ends
a step. Where no scheduler is at hand, the calls' own timesteps tell, with less to go by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch

from magcache import compat

__all__ = ["CallClock", "Clock", "Moment", "SchedulerClock", "Timeline", "strides_between"]


@dataclass(frozen=True)
class Timeline:
    """The steps of one run: share of the schedule and, where known, noise level of each.

    An evaluation of a second-order scheduler counts as a step. `fractions` are i/N over the whole
    schedule, so that a run that begins late (image-to-image) starts above 0. `strides` tell how far
    each step moves the sample for an error of the model (|change of sigma| for flow models).
    `guidance` is the run's guidance scale, where the pipeline tells it.
    """

    fractions: tuple[float, ...]
    levels: tuple[float, ...] | None
    strides: tuple[float, ...]
    guidance: float | None = None

    @property
    def steps(self) -> int:
        return len(self.fractions)


class Moment(NamedTuple):
    """Place of a call: number of the run, step in it, and the run's timeline."""

    run: int
    step: int
    timeline: Timeline


RunEnd = Callable[[bool], None]


class Clock(Protocol):
    """Tells the moment of a call; calls each of `on_end` when a run ends, with True if complete."""

    on_end: list[RunEnd]

    def read(self, timestep: Any, context: Any) -> Moment | None:
        """The moment of a call with this timestep argument and cache context, or None: unknown."""

    def called(self) -> None:
        """The call that was read last has been made."""

    def catch_up(self, timestep: Any) -> Moment | None:
        """The moment of a call that repeats a stream although no step has ended."""

    def abort(self) -> None:
        """End the run that is on, if one is."""


class _Runs:
    """Counts runs and tells listeners when one ends."""

    def __init__(self) -> None:
        self.on_end: list[RunEnd] = []
        self.number = 0
        self.timeline: Timeline | None = None

    def start(self, timeline: Timeline) -> None:
        self.end(complete=False)
        self.number += 1
        self.timeline = timeline

    def end(self, complete: bool) -> None:
        if self.timeline is not None:
            self.timeline = None
            for listener in list(self.on_end):
                listener(complete)


@dataclass
class _Followed:
    """A scheduler whose `step` is wrapped, and the timesteps of its last run.

    `set_timesteps` makes new timesteps, so they tell runs apart.
    """

    scheduler: Any
    wrapper: Any
    timesteps: Any


class SchedulerClock:
    """Follows the schedulers of one or more owners (pipelines, or anything with `.scheduler`).

    Reads a scheduler's timesteps once at the start of a run: that, and for schedulers that keep no
    index the first call's timestep, are the only times when it waits for a device. The scheduler's
    `step` is wrapped on the instance, to count; `detach` takes that off.
    """

    def __init__(self) -> None:
        self._runs = _Runs()
        self.on_end = self._runs.on_end
        self._owners: list[Any] = []
        self._held: list[Any] = []
        self._followed: list[_Followed] = []
        self._active: Any = None
        self._step = 0
        self._timesteps: list[float] = []
        self._begun_at = 0

    @property
    def owners(self) -> tuple[Any, ...]:
        return tuple(self._owners)

    def attach(self, owner: Any) -> None:
        """Follow `owner.scheduler`, also when another one is put there later."""
        if not any(owner is known for known in self._owners):
            self._owners.append(owner)
        self._follow()

    def detach(self, owner: Any) -> None:
        """Stop following `owner`, and unwrap its scheduler."""
        self._owners = [known for known in self._owners if known is not owner]
        self._follow()

    def read(self, timestep: Any, context: Any) -> Moment | None:
        self._follow()
        for followed in self._followed:
            timesteps = _timesteps(followed.scheduler)
            if timesteps is not None and timesteps is not followed.timesteps:
                followed.timesteps = timesteps
                self._begin(followed.scheduler, timesteps, timestep)
        return self._moment()

    def catch_up(self, timestep: Any) -> Moment | None:
        """The moment of this timestep, if it is later than the one that is on.

        For pipelines that step copies of their scheduler only: then a stream is called again while
        no step has ended.
        """
        index = _index_of(timestep, self._timesteps)
        if self._runs.timeline is not None and index is not None and index > self._step:
            self._step = index
        return self._moment()

    def expect(self, owner: Any) -> None:
        """The owner's loop is about to begin: its first call begins a run, and no other does."""
        self._follow()
        for followed in self._followed:
            expected = followed.scheduler is getattr(owner, "scheduler", None)
            followed.timesteps = None if expected else _timesteps(followed.scheduler)

    def called(self) -> None:
        """Nothing to do: steps end with the scheduler's `step`, not with calls."""

    def leave(self) -> None:
        """The loop is over without an error: complete if all steps but the last were made.

        Some loops leave out a terminal timestep, and copies that step do not tell their last.
        """
        timeline = self._runs.timeline
        if timeline is not None:
            self._runs.end(complete=timeline.steps > 1 and self._step == timeline.steps - 1)

    def abort(self) -> None:
        self._runs.end(complete=False)

    def _moment(self) -> Moment | None:
        timeline = self._runs.timeline
        return None if timeline is None else Moment(self._runs.number, self._step, timeline)

    def _begin(self, scheduler: Any, timesteps: Any, timestep: Any) -> None:
        values = [float(t) for t in torch.as_tensor(timesteps).tolist()]
        begin = compat.step_index(scheduler)
        if begin is None:
            begin = compat.begin_index(scheduler)
        if begin is None:
            begin = _index_of(timestep, values) or 0
        scale, total = compat.training_timesteps(scheduler), len(values)
        self._active, self._step = scheduler, 0
        self._begun_at = begin
        self._timesteps = values[begin:]
        levels = tuple(value / scale for value in self._timesteps)
        fractions = tuple(i / total for i in range(begin, total))
        if fractions:
            strides = strides_between(compat.noise_coordinates(scheduler, self._timesteps))
            owners = (o for o in self._owners if getattr(o, "scheduler", None) is scheduler)
            guidance = compat.guidance_scale(next(owners, None))
            self._runs.start(Timeline(fractions, levels, strides, guidance))

    def _tick(self, scheduler: Any) -> None:
        timeline = self._runs.timeline
        if scheduler is not self._active or timeline is None:
            return
        # A pipeline may take a step twice and put the index back in between (Cosmos).
        index = compat.step_index(scheduler)
        made = self._step + 1 if index is None else index - self._begun_at
        if not 0 <= made <= self._step + 1:
            # The run did not begin where its first call's timestep seemed to say.
            self._begin(scheduler, scheduler.timesteps, None)
            return
        self._step = made
        if self._step >= timeline.steps:
            self._runs.end(complete=True)

    def _follow(self) -> None:
        held = [getattr(owner, "scheduler", None) for owner in self._owners]
        if list(map(id, held)) == list(map(id, self._held)):
            return
        self._held = held
        kept = [f for f in self._followed if any(f.scheduler is scheduler for scheduler in held)]
        for followed in self._followed:
            if followed not in kept:
                _unwrap(followed.scheduler, followed.wrapper)
        for scheduler in held:
            if scheduler is not None and not any(f.scheduler is scheduler for f in kept):
                past = _timesteps(scheduler) if compat.is_through(scheduler) else None
                kept.append(_Followed(scheduler, _wrap(scheduler, self._tick), past))
        self._followed = kept


def strides_between(coordinates: Sequence[float]) -> tuple[float, ...]:
    """From each step's place to the next other one; the last one's is at 0.

    Evaluations at the same place (of second-order schedulers) count alike.
    """
    strides: list[float] = []
    after = following = 0.0
    for place in reversed(coordinates):
        if place != following:
            after, following = following, place
        strides.append(abs(place - after))
    return tuple(reversed(strides))


def _timesteps(scheduler: Any) -> Any:
    """The timesteps that were set, or None before that."""
    started = getattr(scheduler, "num_inference_steps", None) is not None
    return getattr(scheduler, "timesteps", None) if started else None


def _wrap(scheduler: Any, tick: Callable[[Any], None]) -> Any:
    own_step = vars(scheduler).get("step")
    plain = getattr(own_step, "__func__", None) or type(scheduler).step

    @functools.wraps(plain)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        tick(self)
        return result

    # A bound method follows the scheduler into a deep copy; the copy's ticks are not ours.
    wrapper = MethodType(step, scheduler)
    step.__dict__["magcache_own"] = own_step
    vars(scheduler)["step"] = wrapper
    return wrapper


def _unwrap(scheduler: Any, wrapper: Any) -> None:
    if vars(scheduler).get("step") is not wrapper:
        return
    own_step = wrapper.__func__.magcache_own
    if own_step is None:
        del vars(scheduler)["step"]
    else:
        vars(scheduler)["step"] = own_step


class CallClock:
    """Tells steps by the timesteps that the calls themselves carry, for loops without a scheduler.

    A step ends when the timestep changes; a run ends after `steps` steps, or when the timesteps
    turn back. Reading a timestep waits for its device: give a scheduler where that matters. A cache
    context that carries step, steps and sigma goes before all that.
    """

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self._runs = _Runs()
        self.on_end = self._runs.on_end
        self._step = 0
        # First and last timestep of the run, and whether timesteps rise (+1) or fall (-1) in it.
        self._first = self._last = 0.0
        self._direction = 0
        self._calls = 0
        self._calls_per_step = 1

    def read(self, timestep: Any, context: Any) -> Moment | None:
        index = getattr(context, "step_index", None)
        steps = getattr(context, "num_inference_steps", None) or self.steps
        if steps is None:
            return None
        if index is not None:
            running = self._runs.timeline
            if running is None or running.steps != steps or index < self._step:
                self._start(steps)
            if index != self._step:
                self._next_step(index)
        else:
            value = _value(timestep)
            if value is None:
                return None
            self._follow(value, steps)
        timeline = self._runs.timeline
        return None if timeline is None else Moment(self._runs.number, self._step, timeline)

    def called(self) -> None:
        """A call has been made: the run is complete after the last stream of the last step."""
        timeline = self._runs.timeline
        self._calls += 1
        last_step = timeline is not None and self._step == timeline.steps - 1
        if last_step and self._calls >= self._calls_per_step:
            self._runs.end(complete=True)

    def catch_up(self, timestep: Any) -> Moment | None:
        timeline = self._runs.timeline
        return None if timeline is None else Moment(self._runs.number, self._step, timeline)

    def abort(self) -> None:
        self._runs.end(complete=False)

    def _start(self, steps: int) -> None:
        fractions = tuple(i / steps for i in range(steps))
        self._runs.start(Timeline(fractions, None, (1 / steps,) * steps))
        self._step, self._calls, self._calls_per_step, self._direction = 0, 0, 1, 0

    def _next_step(self, step: int) -> None:
        self._calls_per_step = max(self._calls_per_step, self._calls)
        self._step, self._calls = step, 0

    def _follow(self, value: float, steps: int) -> None:
        if self._runs.timeline is None:
            self._start(steps)
            self._first = self._last = value
            return
        if value == self._last:
            return
        direction = 1 if value > self._last else -1
        turned = self._direction not in (0, direction)
        self._last = value
        if turned or value == self._first or self._step + 1 >= steps:
            self._start(steps)
            self._first = value
        else:
            self._direction = direction
            self._next_step(self._step + 1)


def _value(timestep: Any) -> float | None:
    """A timestep argument as one number; of one per token, the noisiest."""
    if isinstance(timestep, torch.Tensor):
        return float(timestep.max()) if timestep.numel() else None
    return float(timestep) if isinstance(timestep, int | float) else None


def _index_of(timestep: Any, timesteps: list[float]) -> int | None:
    """Place of a call's timestep, which models take as it is or over 1000."""
    value = _value(timestep)
    if value is None:
        return None
    for index, known in enumerate(timesteps):
        if any(abs(known - v) <= 1e-3 * max(1.0, abs(known)) for v in (value, value * 1000)):
            return index
    return None
