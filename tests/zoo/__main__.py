"""`python -m zoo [ENTRY ...]`, run in tests/: a Markdown table of what the oracle says of each."""

from __future__ import annotations

import logging
import sys
import time

import torch

from zoo import ENTRIES
from zoo.oracle import Row, try_entry

HEADER = (
    "| class | status | lists | exits | measured | skipped | without residual | still runs | s |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


def line(name: str, row: Row, seconds: float) -> str:
    cells = [
        name,
        "; ".join(row.faults()) or "right",
        ", ".join(row.lists),
        ", ".join(row.exits),
        "yes" if row.measured else "",
        f"{max(row.error, row.error_again):.0e}",
        f"{row.error_dropped:.2g}",
        ", ".join(row.still_run),
        f"{seconds:.1f}",
    ]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("magcache").setLevel(logging.ERROR)
    sys.stdout.write(HEADER)
    for name in sys.argv[1:] or sorted(ENTRIES):
        start = time.perf_counter()
        try:
            row = try_entry(ENTRIES[name]())
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")
            sys.stdout.write(f"| {name} | FAILS: {text[:300]} |||||||\n")
        else:
            sys.stdout.write(line(name, row, time.perf_counter() - start))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
