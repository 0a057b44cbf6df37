"""Writes what the last `make bench-peers` found into the documents: `make benchmarks-page`.

The whole of it goes into docs/benchmarks.md, a short table into README.md, each between two
comments; the rest of these pages is written by hand. It is not run by `make bench-peers`, so that a
quick try changes nothing. What was no measurement (few turns, a busy machine) goes into the page,
which says so, and not into the README.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import msgspec

from bench.peers import WHOLE
from bench.peers_report import A_TRY, Report, circumstances, page, short_page

ROOT: Final = Path(__file__).resolve().parent.parent
BEGIN: Final = "<!-- written by `make benchmarks-page` from `make bench-peers` -->"
END: Final = "<!-- until here -->"
README: Final = "README.md"
PAGES: Final = {"docs/benchmarks.md": page, README: short_page}


def main() -> int:
    if not WHOLE.exists():
        sys.stderr.write("nothing is measured yet: run `make bench-peers` first\n")
        return 1
    report = msgspec.json.decode(WHOLE.read_bytes(), type=Report)
    for name, written in PAGES.items():
        if name == README and A_TRY in circumstances(report):
            continue
        path = ROOT / name
        path.write_text(replaced(path.read_text("utf-8"), written(report)), "utf-8")
    return 0


def section(text: str) -> str:
    """What stands between the comments."""
    _, begin, rest = text.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no section between {BEGIN} and {END}")
    return inside.strip("\n")


def replaced(text: str, inside: str) -> str:
    """The page with another section; what is before and behind it stays."""
    section(text)  # raises where there is none
    before, _, rest = text.partition(BEGIN)
    behind = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{inside.strip(chr(10))}\n{END}{behind}"


if __name__ == "__main__":
    sys.exit(main())
