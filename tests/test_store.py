"""Where curves are kept, and which checkpoint a curve belongs to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from models import CASES, Case, Plain, dit, flux, pixart, qwen, randomised, sd3, wan

from magcache import CurveError, MagnitudeCurve
from magcache.store import curve_folder, curve_path, find_curve, fingerprint

BUILDS = [flux, sd3, wan, qwen, pixart, dit]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fingerprint_is_the_weights_not_the_objects(case: Case) -> None:
    model = case.build()
    found = fingerprint(model)
    assert len(found) == 16
    assert int(found, 16) >= 0
    assert fingerprint(case.build()) == fingerprint(copy.deepcopy(model)) == found


@pytest.mark.parametrize("build", BUILDS)
def test_other_weights_have_another_fingerprint(build: Callable[..., Any]) -> None:
    assert fingerprint(build()) != fingerprint(randomised(build(), seed=1))


def test_every_model_has_its_own_fingerprint() -> None:
    assert len({fingerprint(build()) for build in BUILDS}) == len(BUILDS)
    assert fingerprint(sd3(2)) != fingerprint(sd3(3))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to(torch.bfloat16).to(torch.float32),
        lambda m: m.train(),
        lambda m: m.requires_grad_(True),
        lambda m: torch.compile(m),
    ],
    ids=["bfloat16", "rounded", "train", "grad", "compiled"],
)
def test_dtype_and_mode_do_not_change_the_fingerprint(
    build: Callable[..., Any], change: Callable[[Any], Any]
) -> None:
    model = build()
    path = curve_path(model)
    assert curve_path(change(model)) == path


def test_the_given_folder_goes_before_the_environment_and_that_before_the_users_own(
    tmp_path: Path, curve_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert curve_folder(tmp_path / "mine") == tmp_path / "mine"
    assert curve_folder(str(tmp_path)) == tmp_path
    assert curve_folder() == curve_home
    monkeypatch.setenv("MAGCACHE_HOME", "~/curves")
    assert curve_folder() == Path.home() / "curves"
    assert curve_folder("~/x") == Path.home() / "x"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("MAGCACHE_HOME")
        else:
            monkeypatch.setenv("MAGCACHE_HOME", unset)
        assert curve_folder() == platformdirs.user_cache_path("magcache")


def test_a_curve_is_found_again_and_none_where_there_is_none(curve_home: Path) -> None:
    model = randomised(Plain())
    assert find_curve(model) is None
    curve = MagnitudeCurve.from_ratios([1.0, 1.1])
    curve.save(curve_path(model))
    assert curve_path(model) == curve_home / f"Plain-{fingerprint(model)}.json"
    assert find_curve(model) == curve
    assert find_curve(randomised(Plain(), seed=1)) is None
    curve_path(model).write_text("{")
    with pytest.raises(CurveError, match="delete it and calibrate again"):
        find_curve(model)
