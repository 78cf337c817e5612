"""What processes that draw together tell each other, so that they skip the same steps.

Ranks have to skip the same steps where the blocks communicate: under context parallelism, and where
weights are sharded (tensor parallelism, FSDP2). Plans are made from settings, curve and schedule
alone, so they are the same if those are. Nothing is said on a step: ranks speak once before the
first run, to agree on the curve, and once after each run that measures, to average.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from magcache.calibration import pooled
from magcache.config import MagCacheConfig
from magcache.curve import MagnitudeCurve
from magcache.errors import ConfigError, RanksError
from magcache.sharding import groups_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Ranks", "gather_runs", "tell_failure"]

logger = logging.getLogger("magcache")

# Seconds between looks at what others have said. Speaking is rare, and this can be interrupted.
_LOOK = 0.02

_NOTHING = json.dumps({"aborted": True})


class _Circle:
    """A group of ranks that exchange texts, each once a round.

    Texts go through the store that the processes met at, not through collectives: no device waits,
    a rank can say that it failed and go on, and who stays away is known by name.
    """

    def __init__(self, group: ProcessGroup, topic: str, splits_tokens: bool) -> None:
        if distributed.get_rank(group) < 0:
            raise ConfigError(
                f"rank {distributed.get_rank()} is not in the group that was given; every rank "
                "gives a group that it is in"
            )
        self.ranks = tuple(distributed.get_process_group_ranks(group))
        self.splits_tokens = splits_tokens
        self._topic = topic
        self._own = distributed.get_rank()
        name = f"magcache/{topic}/{'-'.join(map(str, self.ranks))}"
        met_at = distributed.distributed_c10d._get_default_store()
        self._store: Any = distributed.distributed_c10d.PrefixStore(name, met_at)

    def say(self, text: str) -> int:
        """Tell the others, without waiting for them; returns the number of the round."""
        # Counted in the store, which outlives what is enabled and disabled meanwhile.
        number = int(self._store.add(f"rounds of {self._own}", 1))
        self._store.set(f"{number}/{self._own}", text)
        return number

    def exchange(self, text: str, what: str) -> list[str]:
        """Every rank's text, in the order of `ranks`.

        Raises `RanksError` if one does not come within the process group's timeout.
        """
        try:
            number = self.say(text)
            keys = {rank: f"{number}/{rank}" for rank in self.ranks}
            end = time.monotonic() + self._store.timeout.total_seconds()
            while not self._store.check(list(keys.values())):
                if time.monotonic() > end:
                    missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                    raise self._alone(missing, what)
                time.sleep(_LOOK)
            texts = [self._store.get(key).decode() for key in keys.values()]
            readers = sum(text != _NOTHING for text in texts)
            have_read = self._store.add(f"{number}/read", 1)
            # Rank 0 may be the store's host, and may end after this.
            while self._own == 0 and have_read < readers and time.monotonic() < end:
                time.sleep(_LOOK)
                have_read = self._store.add(f"{number}/read", 0)
            return texts
        except RuntimeError as error:
            if isinstance(error, RanksError):
                raise
            raise RanksError(
                f"{self._topic}: lost the store that the processes met at while {what} ({error}); "
                "the process that hosts it, mostly rank 0, has ended: look for its error"
            ) from error

    def _alone(self, missing: list[int], what: str) -> RanksError:
        return RanksError(
            f"{self._topic}: rank {self._own} has waited {self._store.timeout} for rank"
            f"{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} while {what}. All of ranks "
            f"{', '.join(map(str, self.ranks))} have to enable the cache and make the same "
            "calibration runs. Look for the error of those that are missing; for a longer wait, "
            "give init_process_group a longer timeout."
        )


class Ranks:
    """The ranks that one transformer's runs are shared with.

    Those that communicate inside its blocks are found by themselves, at the start of a run: the
    model may be sharded after the cache is enabled. `group` are others that were asked for.
    """

    def __init__(self, module: nn.Module, name: str, group: ProcessGroup | None = None) -> None:
        self.group = group
        self._module = module
        self._name = name
        self._asked = [] if group is None else [_Circle(group, name, False)]
        self._circles: list[_Circle] = list(self._asked)
        self._agreed: tuple[object, ...] = ()

    def agree(
        self, config: MagCacheConfig, curve: MagnitudeCurve | None, *, asked: bool
    ) -> MagnitudeCurve | None:
        """The curve of the lowest rank that has one; the others may not see its disk.

        Says nothing where nothing has changed since last time. Ranks whose blocks communicate are
        always spoken to, those of the given group if `asked`. Raises `ConfigError` if the settings
        differ.
        """
        found: dict[tuple[int, ...], _Circle] = {}
        for group, splits_tokens in groups_of(self._module):
            circle = _Circle(group, self._name, splits_tokens)
            found.setdefault(circle.ranks, circle)
        others = [circle for circle in self._asked if circle.ranks not in found]
        self._circles = [*found.values(), *others]
        state = (curve, *found)
        if not asked and state == self._agreed:
            return curve
        for circle in [*found.values(), *(others if asked else ())]:
            curve = _agree(circle, config, curve, self._name)
        self._agreed = (curve, *found)
        return curve

    def measured(self, run: MagnitudeCurve, tokens: int) -> list[MagnitudeCurve]:
        """What this rank's run measured, and what the others' did; empty if one was aborted.

        Parts of one picture are pooled, by their number of tokens.
        """
        runs = [run]
        for circle in self._circles:
            told = _exchange_runs(circle, runs, tokens, self._name)
            if not told:
                return []
            if circle.splits_tokens:
                shares = [tokens for _, tokens in told]
                parts = zip(*(runs for runs, _ in told), strict=True)
                runs = [pooled(part, shares) for part in parts]
            else:
                runs = [run for runs, _ in told for run in runs]
        return runs

    def aborted(self) -> None:
        """This rank's calibration run measured nothing: no other waits for it."""
        for circle in self._circles:
            circle.say(_NOTHING)


def gather_runs(group: ProcessGroup, name: str, runs: list[MagnitudeCurve]) -> list[MagnitudeCurve]:
    """The runs of every rank of a group; empty if another told that it failed."""
    told = _exchange_runs(_Circle(group, name, False), runs, 0, name)
    return [run for runs, _ in told for run in runs]


def tell_failure(group: ProcessGroup, name: str) -> None:
    """Say to those that gather runs that this rank has none, and wait for nobody."""
    _Circle(group, name, False).say(_NOTHING)


def _agree(
    circle: _Circle, config: MagCacheConfig, curve: MagnitudeCurve | None, name: str
) -> MagnitudeCurve | None:
    own = dataclasses.asdict(dataclasses.replace(config, mag_ratios=None))
    known = None if curve is None else curve.model_dump(mode="json")
    text = json.dumps({"settings": own, "curve": known})
    told = [json.loads(t) for t in circle.exchange(text, "agreeing on settings and curve")]
    for rank, other in zip(circle.ranks, told, strict=True):
        differing = [k for k, value in told[0]["settings"].items() if other["settings"][k] != value]
        if differing:
            raise ConfigError(
                f"{name}: rank {rank} has other settings than rank {circle.ranks[0]} "
                f"({', '.join(differing)}), and would skip other steps; give every rank the same"
            )
    having = [i for i, other in enumerate(told) if other["curve"] is not None]
    if not having:
        return None
    theirs = told[having[0]]["curve"]
    if any(told[i]["curve"] != theirs for i in having):
        logger.warning(
            "%s: ranks know different curves; all use that of rank %d",
            name,
            circle.ranks[having[0]],
        )
    if known == theirs:
        return curve
    logger.info("%s: curve from rank %d", name, circle.ranks[having[0]])
    return MagnitudeCurve.model_validate(theirs)


def _exchange_runs(
    circle: _Circle, runs: list[MagnitudeCurve], tokens: int, name: str
) -> list[tuple[list[MagnitudeCurve], int]]:
    """Each rank's runs and number of tokens; empty, with a warning, if one measured nothing."""
    text = json.dumps({"runs": [r.model_dump(mode="json") for r in runs], "tokens": tokens})
    told = [json.loads(t) for t in circle.exchange(text, "averaging a calibration run")]
    lacking = [rank for rank, t in zip(circle.ranks, told, strict=True) if t.get("aborted")]
    if lacking:
        logger.warning(
            "%s: the calibration run of rank%s %s was aborted or too short; it counts on no rank, "
            "and the next one measures again",
            name,
            "s" * (len(lacking) > 1),
            ", ".join(map(str, lacking)),
        )
        return []
    return [([MagnitudeCurve.model_validate(run) for run in t["runs"]], t["tokens"]) for t in told]
