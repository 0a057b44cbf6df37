"""The command `magnetar`: its verbs, and how errors leave it.

Owns: the top of the command line. One module per verb does the work, and is loaded when that verb
is called: a server that starts does not wait for what other verbs need.

Invariants:
1. An error of Magnetar is one line on stderr, `error: ...` with its hint, and exit code 1.
2. A wrong call is exit code 2, as click has it. 0 means: done, and what was to be verified was.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

from magnetar.errors import MagnetarError

VERBS: Final = {
    "consume": "verbs.consume",
    "demo": "demo.demo",
    "doctor": "verbs.doctor",
    "namespaces": "verbs.namespaces",
    "pipeline": "verbs.pipeline",
    "produce": "verbs.produce",
    "quickstart": "quickstart.quickstart",
    "serve": "verbs.serve",
    "subscriptions": "verbs.subscriptions",
    "topics": "verbs.topics",
    "txn": "verbs.txn",
    "verify": "verbs.verify",
}
"""The module of each verb; the command in it has the verb's name."""


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # click itself turns this into a wrong call, with exit code 2 (invariant 2).
        if cmd_name not in VERBS:
            return None
        # Only now: Spark, aiohttp or rich are loaded for the verbs that use them, and for no other.
        found = getattr(import_module(f"magnetar.cli.{VERBS[cmd_name]}"), cmd_name)
        assert isinstance(found, click.Command), f"{cmd_name} is no command"
        return found

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        # Others pass with their trace: they are bugs, and a line would hide where.
        except MagnetarError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)


@click.group(cls=_Verbs)
@click.version_option(package_name="magnetar", message="%(prog)s %(version)s")
def main() -> None:
    """Magnetar, an event-streaming server."""
