"""Settings: what is accepted, what is refused at once, and how they are saved."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_curve import curves

from magcache import ConfigError, MagCacheConfig, MagCacheError, MagnitudeCurve

configs = st.builds(
    MagCacheConfig,
    threshold=st.floats(0, 1e9) | st.integers(0, 5),
    max_skip_steps=st.integers(0, 99),
    retention_ratio=st.floats(0, 1),
    num_inference_steps=st.none() | st.integers(1, 999),
    mag_ratios=st.none()
    | st.lists(st.floats(0.01, 100), min_size=1, max_size=9)
    | st.text(min_size=1)
    | curves,
    mag_calibrate=st.booleans(),
    transformer_type=st.none() | st.text(),
)


@given(configs)
def test_json_round_trip(tmp_path_factory: pytest.TempPathFactory, config: MagCacheConfig) -> None:
    path = tmp_path_factory.mktemp("config") / "deep" / "config.json"
    assert config.save(path) == path
    assert MagCacheConfig.load(path) == config
    json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


NOT_NUMBERS = [math.nan, math.inf, -math.inf, None, "0.1", True, [0.1], 1j]
REFUSED: list[tuple[str, Any]] = [
    *(("threshold", bad) for bad in [*NOT_NUMBERS, -0.01, -1]),
    *(("max_skip_steps", bad) for bad in [*NOT_NUMBERS, -1, 2.0, 1.5]),
    *(("retention_ratio", bad) for bad in [*NOT_NUMBERS, 7, 1.01, -0.1]),
    *(("num_inference_steps", bad) for bad in [b for b in NOT_NUMBERS if b] + [0, -1, 2.5]),
    *(("mag_calibrate", bad) for bad in [None, 1, 0, "yes"]),
    *(("transformer_type", bad) for bad in [1, MagCacheConfig, ["x"]]),
    ("mag_ratios", []),
    ("mag_ratios", ()),
    ("mag_ratios", torch.ones(0)),
    ("mag_ratios", [1.0, math.nan]),
    ("mag_ratios", [1.0, math.inf]),
    ("mag_ratios", [1.0, -0.5]),
    ("mag_ratios", [1.0, 0]),
    ("mag_ratios", [[1.0, 1.0], [1.0, 1.0]]),
    ("mag_ratios", torch.ones(2, 3)),
    ("mag_ratios", torch.tensor(1.0)),
    ("mag_ratios", torch.tensor([1.0, math.nan])),
    ("mag_ratios", 1.0),
    ("mag_ratios", ["one"]),
    ("mag_ratios", {"all": [1.0]}),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=lambda v: str(v)[:30])
def test_bad_setting_is_refused_at_once_and_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field}") as caught:
        MagCacheConfig(**{field: value})
    assert isinstance(caught.value, MagCacheError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("threshold", -0.5, "-0.5.*0 or more"),
        ("retention_ratio", 7, "7.*from 0 to 1"),
        ("num_inference_steps", 0, "0.*1 or more"),
        ("max_skip_steps", -3, "-3.*0 or more"),
        ("mag_calibrate", "yes", "'yes'.*True or False"),
        ("mag_ratios", torch.ones(2, 3), r"\(2, 3\).*one dimension"),
    ],
)
def test_the_error_tells_the_value_and_the_remedy(field: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}.*{said}"):
        MagCacheConfig(**{field: value})


@pytest.mark.parametrize("make", [list, tuple, torch.tensor, iter], ids=lambda m: m.__name__)
def test_ratios_are_taken_in_any_flat_form(make: Any) -> None:
    assert MagCacheConfig(mag_ratios=make([1.0, 1.5, 0.5])).mag_ratios == (1.0, 1.5, 0.5)


def test_ratios_in_half_precision_and_with_a_gradient_are_read() -> None:
    ratios = torch.tensor([1.0, 1.5], dtype=torch.bfloat16, requires_grad=True)
    assert MagCacheConfig(mag_ratios=ratios).mag_ratios == (1.0, 1.5)


def test_limits_themselves_are_accepted() -> None:
    config = MagCacheConfig(0, 0, 0, 1, [1])
    assert (config.threshold, config.max_skip_steps, config.num_inference_steps) == (0, 0, 1)
    assert MagCacheConfig(retention_ratio=1).retention_ratio == 1


def test_defaults_are_the_mild_settings() -> None:
    config = MagCacheConfig()
    assert dataclasses.astuple(config) == (
        *(0.06, 3, 0.2, None, None, False, None, None, "joint", "device"),
    )


def test_settings_cannot_be_changed_past_the_checks() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MagCacheConfig().threshold = -1  # type: ignore[misc]
    with pytest.raises(ConfigError, match="threshold"):
        dataclasses.replace(MagCacheConfig(), threshold=-1)


@pytest.mark.parametrize("key", ["mag_threshold", "K", "Threshold", ""])
def test_unknown_key_is_refused_and_the_known_ones_are_told(tmp_path: Path, key: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"threshold": 0.1, key: 1}))
    with pytest.raises(ConfigError, match=f"unknown setting {key}.*max_skip_steps"):
        MagCacheConfig.load(path)
    with pytest.raises(TypeError):
        MagCacheConfig(**{key: 1})


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"threshold": 0.1',
        "[0.1]",
        "null",
        '{"threshold": NaN}',
        '{"threshold": true}',
        '{"threshold": "0.1"}',
        '{"retention_ratio": 7}',
        '{"mag_ratios": []}',
        '{"mag_ratios": [[1.0]]}',
        '{"mag_ratios": {"axis": "noise"}}',
        '{"mag_ratios": {"axis": "noise", "streams": {"a": {"places": [1], "ratios": [-1]}}}}',
    ],
)
def test_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        MagCacheConfig.load(path)


def test_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: no such file"):
        MagCacheConfig.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ConfigError, match=r"binary\.json: not JSON"):
        MagCacheConfig.load(tmp_path / "binary.json")


def test_a_file_may_name_some_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"threshold": 0.24}')
    assert MagCacheConfig.load(path) == MagCacheConfig(threshold=0.24)


def test_a_curve_stays_a_curve(tmp_path: Path) -> None:
    curve = MagnitudeCurve.from_ratios([1, 1, 2, 3], layout="cfg_interleaved")
    loaded = MagCacheConfig.load(MagCacheConfig(mag_ratios=curve).save(tmp_path / "c.json"))
    assert loaded.mag_ratios == curve
