"""The option of verbs with which a subscription reads what is not committed."""

from __future__ import annotations

from typing import Final

import click

from magnetar.model.isolation import ISOLATION_PROPERTY, ReadIsolation

read_uncommitted_option: Final = click.option(
    "--read-uncommitted",
    is_flag=True,
    help="A new subscription gets messages of undecided and of aborted transactions too.",
)


def isolation_properties(read_uncommitted: bool) -> dict[str, str]:
    """What a new subscription asks for."""
    # Nothing is said for `read_committed`: it is what a subscription has without the property.
    return {ISOLATION_PROPERTY: ReadIsolation.UNCOMMITTED.value} if read_uncommitted else {}
