"""The next command of a tour: what a verb tells people to type, so that it can be pasted.

It is apart from `output`, for a server that starts does not wait until tables can be drawn.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

_PROGRAM: Final = "magnetar"


def to_type(verb: str) -> str:
    """A command to go on with: where the search path does not know the program, as after a set-up
    in `.venv`, by the path that it was called by.
    """
    given = Path(sys.argv[0])
    found = shutil.which(_PROGRAM)
    is_found = found is not None and given.exists() and given.samefile(found)
    program = _PROGRAM if is_found or given.name != _PROGRAM else shlex.quote(sys.argv[0])
    return f"{program} {verb}"
