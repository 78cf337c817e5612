#!/usr/bin/env bash
# tests/old_diffusers.sh VERSION [SECONDS]: a smaller set of tests with another diffusers release,
# in an environment of its own, build/diffusers-VERSION. SECONDS (900) is the most that they may run.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:?give a diffusers version, 0.36.0 say}
limit=${2:-900}
home=build/diffusers-$version

if [[ ! -e $home/.installed || pyproject.toml -nt $home/.installed ]]; then
    # diffusers 0.36 does not import with transformers 5.
    [[ $version == 0.36.* ]] && transformers="transformers<5" || transformers=transformers
    "${PYTHON:-python3}" -m venv "$home"
    "$home/bin/pip" --disable-pip-version-check --quiet install -c constraints.txt \
        -e . "diffusers==$version" "$transformers" accelerate hypothesis pytest
    touch "$home/.installed"
fi

timeout "$limit" "$home/bin/python" -m pytest -p no:cacheprovider \
    tests/test_zoo.py tests/test_plan.py tests/test_curve.py
