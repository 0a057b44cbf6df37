"""The reference page of transactions, written from the tables of the model (pure).

Owns: `page`, the text of docs/reference/transactions.md, and the tables that only the page needs:
`RECORDS` (what stands in the store) and `FLOWS` (which actions make up a flow, in order).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from magnetar.txn.spec.actions import acking, cursors, owning, publishing
from magnetar.txn.spec.actions.publishing import Edge
from magnetar.txn.spec.invariants import INVARIANTS
from magnetar.txn.spec.machine import ACTIONS
from magnetar.txn.spec.rules import RULES, Rules
from magnetar.txn.spec.scenarios import LARGE, SCENARIOS
from magnetar.txn.spec.world import Action, World


class Record(NamedTuple):
    """A kind of record in the store."""

    name: str
    key: str
    value: str
    life: str


RECORDS: Final = (
    Record(
        "header",
        "`/txn/id/<txn>`",
        "state, created, deadline, finalized, owner, group",
        "created by NEW_TXN; one compare-and-set decides; deleted by GC when no op is left",
    ),
    Record(
        "write op (pin)",
        "`/txn/op/<txn>-w-<segment>`",
        "segment, lower bound, owner epoch",
        "created before the first entry; adopted by a new owner while the transaction is open; "
        "deleted by its owner, in that version, once the decision is materialised",
    ),
    Record(
        "ack op",
        "`/txn/op/<txn>-a-<segment>:<sub>-<epoch>-<n>`",
        "segment, subscription, cursor incarnation, positions",
        "created before the ack's answer; deleted when the durable cursor holds it, or on abort",
    ),
    Record(
        "aborted",
        "`/txn/aborted/<segment>:<txn>`",
        "last position, merged as a maximum",
        "written before the pin goes; swept when the segment is trimmed past it",
    ),
    Record(
        "group",
        "`/txn/group/<app>`",
        "epoch, sequence, decided ids, aborted members",
        "decides on all its members; outlives their headers",
    ),
)

# A test holds these to the names of the model's actions.
FLOWS: Final = {
    "Publish": (
        "publish.track",
        "publish.read",
        "publish.pin",
        "publish.submit",
        "publish.land",
        "publish.more",
    ),
    "Acknowledge": ("ack.ask", "ack.read", "ack.put", "ack.answer"),
    "Decide": ("end.commit", "end.abort"),
    "Decide on a group": (
        "group.open",
        "group.read",
        "group.roll",
        "group.decide",
        "copy.read",
        "copy.write",
    ),
    "Materialise a commit": (
        "learn",
        "unpin",
        "ack.learn",
        "ack.merge",
        "flush.start",
        "flush.land",
        "ack.delete",
    ),
    "Materialise an abort": ("learn", "abort.record", "unpin", "ack.drop", "ack.delete"),
    "Recovery of a segment": (
        "own.load",
        "recover.fence",
        "recover.pin",
        "recover.header",
        "recover.adopt",
        "recover.reread",
        "recover.aborted",
    ),
    "Recovery of a subscription": (
        "cursor.load",
        "cursor.fence",
        "cursor.ops",
        "cursor.header",
        "cursor.read",
    ),
    "Collect and trim": ("gc.check", "rescan", "ack.rescan", "gc.delete", "trim", "sweep"),
}

_INTRODUCTION: Final = """\
# Transactions: the protocol

This page is written by `python -m magnetar.txn.spec describe` from the tables of the executable
model in `magnetar.txn.spec`. The model knows every record, every durable write and every read of
the protocol; a search visits each state that bounded worlds can reach, with crashes, owner changes,
former owners whose writes arrive late, failing stores, splits, seeks and trims at every point, and
checks the invariants on all of them. `... spec explore <scenario>` repeats a search,
`... spec without <rule>` shows what happens without a rule, step by step.

The store compares and sets one key at a time; nothing is atomic over two. A decision is one such
write. Everything else is found out by reading, can be done twice, and can be taken up by another.

Outside of the model: what a client makes of answers (it never commits after an error), dedup of
sends, batch indexes, cumulative acks, deadlines as times, the retired runs of groups. It assumes
that finished headers are kept longer than an owner that holds the segment works on one message; a
former owner may be later than that.
"""


def is_of_the_protocol(action: Action) -> bool:
    """False for what happens only if a rule is broken."""
    return not action.text.startswith("(only without")


def page() -> str:
    """The whole page."""
    sections = (
        _INTRODUCTION,
        _records(),
        _stages(),
        _flows(),
        _invariants(),
        _rules(),
        _actions(),
        _scenarios(),
    )
    return "\n".join(sections)


def _records() -> str:
    rows = [(record.name, record.key, record.value, record.life) for record in RECORDS]
    return "## Records\n\n" + _table(("record", "key", "value", "life"), rows)


def _stages() -> str:
    # Any scenario will do: the phases depend on the rules alone.
    world = World(SCENARIOS["takeover"], Rules())
    return "\n".join(
        (
            "## States\n",
            "A header is OPEN, then COMMITTED or ABORTED for good, then gone. A member's state is "
            "read from the group first, then from the header: a final header wins, then the "
            "group's word; without a header there is no transaction.\n",
            _diagram(
                (Edge("open", "committed", "end.commit"), Edge("open", "aborted", "end.abort"))
            ),
            "What a segment's owner knows of a transaction:\n",
            _diagram(publishing.EDGES),
            _table(("stage", "meaning"), publishing.STAGES.items()),
            "What a subscription's owner knows of a transaction:\n",
            _diagram(acking.EDGES),
            _table(("stage", "meaning"), acking.STAGES.items()),
            f"Phases of a segment's recovery: {_chain(owning.phases(world))}.\n",
            f"Phases of a subscription's recovery: {_chain(cursors.phases(world))}.\n",
        )
    )


def _chain(names: Iterable[str]) -> str:
    return " -> ".join(names)


def _diagram(edges: Iterable[Edge]) -> str:
    lines = [f"    {edge.before} --> {edge.after} : {_label(edge.action)}" for edge in edges]
    return "\n".join(("```mermaid", "stateDiagram-v2", *lines, "```\n"))


def _label(action: str) -> str:
    # A second colon ends a label in Mermaid.
    return action.replace(":", " -")


def _flows() -> str:
    by_name = {action.name: action for action in ACTIONS}
    lines = ["## Flows\n"]
    for flow, steps in FLOWS.items():
        lines.append(f"**{flow}**\n")
        for at, name in enumerate(steps, start=1):
            action = by_name[name]
            lines.append(f"{at}. `{name}` ({action.kind}): {action.text}")
        lines.append("")
    return "\n".join(lines)


def _invariants() -> str:
    rows = []
    for invariant in INVARIANTS:
        rules = [f"`{rule.name}`" for rule in RULES if invariant.name in rule.protects]
        rows.append((invariant.name, invariant.text, ", ".join(rules)))
    return "## Invariants\n\n" + _table(("invariant", "as the model checks it", "rules"), rows)


def _rules() -> str:
    rows = [
        (
            f"`{rule.name}`",
            rule.flow,
            rule.text,
            rule.without,
            ", ".join(rule.protects),
            rule.finding,
        )
        for rule in RULES
    ]
    titles = ("rule", "flow", "what it says", "without it", "breaks without it", "finding")
    text = (
        "## Rules and failure cases\n\n"
        "Each rule is there because a search without it ends in a broken invariant. A finding is "
        "the number of a known failure of metadata-driven transactions elsewhere.\n\n"
    )
    return text + _table(titles, rows)


def _actions() -> str:
    rows = [
        (f"`{action.name}`", action.actor, action.kind, action.text)
        for action in ACTIONS
        if is_of_the_protocol(action)
    ]
    return "## Actions\n\n" + _table(("action", "who", "kind", "what"), rows)


def _scenarios() -> str:
    rows = [
        (f"`{one.name}`", one.text, f"{one.states:,}", "large" if one.name in LARGE else "")
        for one in SCENARIOS.values()
    ]
    return "## Scenarios\n\n" + _table(("scenario", "what happens", "states", ""), rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row(titles), _row(["---"] * len(titles)), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
