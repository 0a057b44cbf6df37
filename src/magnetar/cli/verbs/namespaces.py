"""`magnetar namespaces ...`: namespaces and their policies."""

from __future__ import annotations

from typing import Any

import click

from magnetar.cli.admin_client import (
    AdminClient,
    admin_options,
    ask,
    json_option,
    namespace_path,
    part,
)
from magnetar.cli.output import print_json, print_table, retention_text


@click.group()
def namespaces() -> None:
    """Namespaces and their policies."""


@namespaces.command("list")
@click.argument("tenant", required=False)
@admin_options
@json_option
def list_namespaces(tenant: str | None, admin_url: str | None, as_json: bool) -> None:
    """List the namespaces of TENANT, or of all tenants."""

    async def work(admin: AdminClient) -> list[str]:
        tenants = [tenant] if tenant is not None else await admin.get("tenants")
        found: list[str] = []
        for each in tenants:
            found += await admin.get(f"namespaces/{part(each)}")
        return sorted(found)

    found = ask(admin_url, work)
    if as_json:
        print_json(found)
    else:
        print_table(("namespace",), [(name,) for name in found], none="no namespaces")


@namespaces.command()
@click.argument("namespace")
@admin_options
def create(namespace: str, admin_url: str | None) -> None:
    """Create NAMESPACE (tenant/name), and its tenant if there is none."""
    path = namespace_path(namespace)

    async def work(admin: AdminClient) -> None:
        tenant = path.partition("/")[0]
        # In Pulsar the tenant has to be there; for a quick try
        # that would be one command too many.
        if await admin.get_or_none(f"tenants/{tenant}") is None:
            clusters = await admin.get("clusters")
            await admin.put(f"tenants/{tenant}", {"adminRoles": [], "allowedClusters": clusters})
        await admin.put(f"namespaces/{path}")

    ask(admin_url, work)
    click.echo(f"created {path}")


@namespaces.command()
@click.argument("namespace")
@click.option("--force", is_flag=True, help="With all its topics.")
@admin_options
def delete(namespace: str, force: bool, admin_url: str | None) -> None:
    """Delete NAMESPACE; without --force only an empty one."""
    path = namespace_path(namespace)
    flag = "true" if force else "false"
    ask(admin_url, lambda admin: admin.delete(f"namespaces/{path}", force=flag))
    click.echo(f"deleted {path}")


@namespaces.command()
@click.argument("namespace")
@admin_options
@json_option
def show(namespace: str, admin_url: str | None, as_json: bool) -> None:
    """Show the policies of NAMESPACE."""
    path = namespace_path(namespace)
    found = ask(admin_url, lambda admin: admin.get(f"namespaces/{path}"))
    if as_json:
        print_json(found)
    else:
        in_force = found.pop("retentionInForce", {})
        rows = [(name, value) for name, value in sorted(found.items()) if value is not None]
        # Last, for it is not set here, or not only: what holds for topics of each kind.
        for domain, retention in sorted(in_force.items()):
            rows.append((f"kept of {domain}:// topics", retention_text(retention)))
        print_table(("policy", "value"), rows, none="no policies")


@namespaces.command()
@click.argument("namespace")
@click.option("--minutes", type=click.IntRange(-1), help="Keep acknowledged messages so long.")
@click.option("--megabytes", type=click.IntRange(-1), help="Keep so many of them; -1: no limit.")
@click.option("--clear", is_flag=True, help="Back to the default.")
@admin_options
@json_option
def retention(
    namespace: str,
    minutes: int | None,
    megabytes: int | None,
    clear: bool,
    admin_url: str | None,
    as_json: bool,
) -> None:
    """Show, or set, how long NAMESPACE keeps messages that everyone has acknowledged."""
    # The policy is one value with both limits: half of it cannot be set.
    if (minutes is None) != (megabytes is None):
        raise click.UsageError("--minutes and --megabytes go together (-1: no limit)")
    value = None
    if minutes is not None:
        value = {"retentionTimeInMinutes": minutes, "retentionSizeInMB": megabytes}
    _policy(namespace, "retention", value, clear, admin_url, as_json)


@namespaces.command()
@click.argument("namespace")
@click.argument("switch", type=click.Choice(("on", "off")), required=False)
@click.option("--clear", is_flag=True, help="Back to the default.")
@admin_options
@json_option
def deduplication(
    namespace: str, switch: str | None, clear: bool, admin_url: str | None, as_json: bool
) -> None:
    """Show whether messages sent twice are stored once in NAMESPACE, or turn it on or off."""
    value = None if switch is None else switch == "on"
    _policy(namespace, "deduplication", value, clear, admin_url, as_json)


@namespaces.command("auto-topics")
@click.argument("namespace")
@click.argument("switch", type=click.Choice(("on", "off")), required=False)
@click.option("--partitions", type=click.IntRange(1), help="Make partitioned topics.")
@click.option("--clear", is_flag=True, help="Back to the default.")
@admin_options
@json_option
def auto_topics(
    namespace: str,
    switch: str | None,
    partitions: int | None,
    clear: bool,
    admin_url: str | None,
    as_json: bool,
) -> None:
    """Show whether clients create topics of NAMESPACE by using them, or turn it on or off."""
    value: dict[str, object] | None = None
    if switch is not None:
        value = {"allowAutoTopicCreation": switch == "on", "topicType": "non-partitioned"}
        if partitions is not None:
            value |= {"topicType": "partitioned", "defaultNumPartitions": partitions}
    # Without `on` it would be read, and do nothing.
    elif partitions is not None:
        raise click.UsageError("--partitions goes with `on`")
    _policy(namespace, "autoTopicCreation", value, clear, admin_url, as_json)


@namespaces.command("auto-subscriptions")
@click.argument("namespace")
@click.argument("switch", type=click.Choice(("on", "off")), required=False)
@click.option("--clear", is_flag=True, help="Back to the default.")
@admin_options
@json_option
def auto_subscriptions(
    namespace: str, switch: str | None, clear: bool, admin_url: str | None, as_json: bool
) -> None:
    """Show whether consumers create subscriptions of NAMESPACE, or turn it on or off."""
    value = None if switch is None else {"allowAutoSubscriptionCreation": switch == "on"}
    _policy(namespace, "autoSubscriptionCreation", value, clear, admin_url, as_json)


@namespaces.command("transaction-kind")
@click.argument("namespace")
@click.argument("kind", type=click.Choice(("auto", "metadata", "markers")), required=False)
@click.option("--clear", is_flag=True, help="Back to the default.")
@admin_options
@json_option
def transaction_kind(
    namespace: str, kind: str | None, clear: bool, admin_url: str | None, as_json: bool
) -> None:
    """Show, or set, how topics of NAMESPACE keep legacy transactions: in records or by markers."""
    _policy(namespace, "transactionKind", kind, clear, admin_url, as_json)


def _policy(
    namespace: str, policy: str, value: object, clear: bool, admin_url: str | None, as_json: bool
) -> None:
    """Set it, clear it, or show it."""
    # Three uses by what was given: nothing shows, a value sets, --clear goes back to the default.
    if clear and value is not None:
        raise click.UsageError("--clear goes alone")
    path = f"namespaces/{namespace_path(namespace)}/{policy}"

    async def work(admin: AdminClient) -> Any:
        if clear:
            await admin.delete(path)
        elif value is not None:
            await admin.post(path, value)
        # Always read back: what is shown is what the server has now.
        found = await admin.get(path)
        # An empty answer means that the namespace has no value of its own.
        return None if found == "" else found

    found = ask(admin_url, work)
    if as_json:
        print_json(found)
    elif found is None:
        click.echo(f"{policy} of {namespace}: the default")
    elif isinstance(found, dict):
        print_table(("setting", "value"), list(found.items()), none="")
    else:
        # Policies are words or switches by now: those with several settings went into the table.
        shown = found if isinstance(found, str) else "on" if found else "off"
        click.echo(f"{policy} of {namespace}: {shown}")
