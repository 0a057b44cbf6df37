"""The command `magnetar`: its verbs, and how errors leave it.

Owns: the top of the command line. One module per verb does the work.

Invariants:
1. An error of Magnetar is one line on stderr, `error: ...` with its hint, and exit code 1.
2. A wrong call is exit code 2, as click has it. 0 means: done, and what was to be verified was.
"""

from __future__ import annotations

import click

from magnetar.cli.consume import consume
from magnetar.cli.demo import demo
from magnetar.cli.doctor import doctor
from magnetar.cli.namespaces import namespaces
from magnetar.cli.produce import produce
from magnetar.cli.serve import serve
from magnetar.cli.subscriptions import subscriptions
from magnetar.cli.topics import topics
from magnetar.cli.verify import verify
from magnetar.errors import MagnetarError


class _Verbs(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except MagnetarError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)


@click.group(cls=_Verbs)
@click.version_option(package_name="magnetar", message="%(prog)s %(version)s")
def main() -> None:
    """Magnetar, an event-streaming server."""


main.add_command(consume)
main.add_command(demo)
main.add_command(doctor)
main.add_command(namespaces)
main.add_command(produce)
main.add_command(serve)
main.add_command(subscriptions)
main.add_command(topics)
main.add_command(verify)
