"""How many examples property tests try that do not go by the profile's number."""

from __future__ import annotations

from hypothesis import settings

_ALL = settings.get_profile("magnetar").max_examples


def examples(count: int) -> int:
    """So many, or their share where the profile in use tries fewer (`make check`)."""
    return max(1, count * settings().max_examples // _ALL)
