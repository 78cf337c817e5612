"""What every test stands on: own curve folder, one thread, fixed seeds, quiet bars."""

from collections.abc import Iterator
from pathlib import Path

import diffusers
import pytest
import torch

from magcache import MagCacheStrategyRegistry

diffusers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def curve_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's own curves."""
    home = tmp_path / "curves"
    monkeypatch.setenv("MAGCACHE_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def seeds() -> None:
    torch.manual_seed(0)


@pytest.fixture
def registry() -> Iterator[type[MagCacheStrategyRegistry]]:
    """The strategy registry, put back as it was after the test."""
    before = dict(MagCacheStrategyRegistry._strategies)
    yield MagCacheStrategyRegistry
    MagCacheStrategyRegistry._strategies.clear()
    MagCacheStrategyRegistry._strategies.update(before)
