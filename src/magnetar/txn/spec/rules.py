"""The rules of the transaction protocol, each with a name and a switch (pure).

Owns: `Rules`, the set of rules that a world obeys (all of them, unless a test asks what breaks
without one), and `RULES`, the table of what each rule says, what happens without it, to which flow
it belongs, which invariant breaks without it, and in which scenario.

Invariants:
1. Every field of `Rules` is described once in `RULES`, in the same order.
2. A rule is on by default.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

from magnetar.txn.spec import names


class Rule(NamedTuple):
    """A rule of the protocol: its words, and the search that fails without it."""

    name: str
    text: str
    without: str
    flow: str
    # The known failure of other implementations that it rules out, by its usual number.
    finding: str
    protects: tuple[str, ...]
    scenario: str


def _rule(text: str, without: str, flow: str, finding: str, scenario: str, *protects: str) -> bool:
    # The text stands with the switch, so that no rule is without one, and
    # the page cannot lag behind.
    described = {"described": (text, without, flow, finding, protects, scenario)}
    # The dataclass turns the field into a bool; the annotation says so already.
    switch: bool = field(default=True, metadata=described)
    return switch


@dataclass(frozen=True)
class Rules:
    """The rules that hold. `replace(Rules(), fence_before_pins=False)` asks what one is for."""

    rebuild_pending_acks: bool = _rule(
        "Recovery of a subscription rebuilds the pending acks from the ack ops.",
        "only the transaction ids are remembered; a commit then merges nothing",
        "recovery of a subscription",
        "F1",
        "ack-takeover",
        names.INTENTS_OUTLIVE_CURSOR,
    )
    flush_before_ack_delete: bool = _rule(
        "An ack op is deleted only after a durable cursor write that holds it.",
        "the op is deleted when the cursor in memory holds it",
        "materialise",
        "F2",
        "acks",
        names.INTENTS_OUTLIVE_CURSOR,
    )
    snapshot_after_merge: bool = _rule(
        "That cursor write's snapshot was taken after the merge.",
        "any cursor write that ends after the merge counts",
        "materialise",
        "",
        "acks",
        names.INTENTS_OUTLIVE_CURSOR,
    )
    pin_holds_bound: bool = _rule(
        "A pin holds a lower bound of its entries, and recovery holds the ceiling below it.",
        "a recovered transaction is taken to start at the new owner's first position",
        "recovery of a segment",
        "F3",
        "takeover",
        names.READ_COMMITTED,
    )
    gate_shut_until_recovered: bool = _rule(
        "The ceiling is 'nothing' until recovery has finished.",
        "during recovery the ceiling follows what is known so far",
        "recovery of a segment",
        "F4",
        "takeover",
        names.READ_COMMITTED,
    )
    plain_publish_keeps_gate: bool = _rule(
        "A plain publish during recovery does not touch the gate.",
        "it computes the ceiling from what is known so far, and so opens the gate",
        "recovery of a segment",
        "F5",
        "takeover",
        names.READ_COMMITTED,
    )
    pins_before_aborted: bool = _rule(
        "Recovery reads pins, then headers, then aborted records.",
        "aborted records are read first",
        "recovery of a segment",
        "F6",
        "takeover",
        names.READ_COMMITTED,
    )
    untrack_when_pin_fails: bool = _rule(
        "A transaction whose pin could not be written is tracked no longer.",
        "it stays tracked, without a pin, and holds the ceiling",
        "publish",
        "F8",
        "store-failures",
        names.GATE,
    )
    unpend_when_ack_fails: bool = _rule(
        "An ack whose intent could not be written is pending no longer.",
        "the message stays pending without an intent",
        "ack",
        "F8",
        "store-failures",
        names.ALL_OR_NOTHING,
    )
    track_before_read: bool = _rule(
        "A transaction is tracked before its header is read, so that a decision finds it.",
        "the header is read first; a decision in between meets nobody and is missed",
        "publish",
        "F8",
        "publish",
        names.FENCE,
    )
    abort_waits_for_appends: bool = _rule(
        "An abort waits for the appends in flight before it records the last position.",
        "the record covers only what is durable by then",
        "materialise",
        "F9",
        "publish",
        names.ABORTED_STAYS_KNOWN,
    )
    recheck_after_pin: bool = _rule(
        "After the pin is written, and before each append, the decision is checked again.",
        "an append that waited for its pin goes ahead whatever was decided meanwhile",
        "publish",
        "F10",
        "publish",
        names.FENCE,
    )
    pin_before_entry: bool = _rule(
        "The pin is durable before the first entry is.",
        "the entry is appended first, the pin written after it",
        "publish",
        "",
        "publish",
        names.PIN_BEFORE_ENTRY,
    )
    aborted_before_unpin: bool = _rule(
        "The aborted record is durable before the pin is deleted and the ceiling rises.",
        "the pin goes first",
        "materialise",
        "",
        "publish",
        names.ABORTED_STAYS_KNOWN,
    )
    aborted_record_is_maximum: bool = _rule(
        "The aborted record's last position is merged as a maximum.",
        "the last writer wins, be it a former owner that knows less",
        "materialise",
        "",
        "late-writes",
        names.ABORTED_STAYS_KNOWN,
    )
    new_ledger_per_load: bool = _rule(
        "Every load of a segment appends to a new ledger; a fenced one is never opened again.",
        "the new owner goes on in the last ledger, and so may the former one",
        "recovery of a segment",
        "",
        "takeover",
        names.READ_COMMITTED,
    )
    fence_before_pins: bool = _rule(
        "Recovery fences the last ledger before it reads the pins.",
        "pins are read first; the former owner pins and appends after that",
        "recovery of a segment",
        "",
        "takeover",
        names.READ_COMMITTED,
    )
    adopt_pins: bool = _rule(
        "Recovery adopts the pin of each open transaction by compare-and-set with its own epoch, "
        "so that a former owner's conditional delete fails.",
        "pins are only read",
        "recovery of a segment",
        "",
        "late-writes",
        names.PIN_BEFORE_ENTRY,
        names.ABORTED_STAYS_KNOWN,
    )
    adopt_only_open: bool = _rule(
        "The header is read before the adoption, and only the pins of open transactions are "
        "adopted: the epoch in a pin is one that could append under it.",
        "each pin is adopted as it is found, a late one of a finished transaction too",
        "recovery of a segment",
        "",
        "late-adoption",
        names.ALL_OR_NOTHING,
    )
    conditional_delete: bool = _rule(
        "An op is deleted only in the version that its owner wrote or adopted.",
        "whatever stands under the key is deleted",
        "materialise",
        "",
        "late-writes",
        names.PIN_BEFORE_ENTRY,
        names.ABORTED_STAYS_KNOWN,
    )
    reread_pin: bool = _rule(
        "A pin whose header is missing is read again: gone means that the aborted record decides.",
        "a missing header means aborted",
        "recovery of a segment",
        "",
        "takeover",
        names.ALL_OR_NOTHING,
    )
    late_pin_covers_its_epoch: bool = _rule(
        "A pin that outlived its header aborts only what its writer's epoch could append.",
        "it aborts all entries of that transaction up to the segment's end",
        "recovery of a segment",
        "",
        "late-writes",
        names.ALL_OR_NOTHING,
    )
    stale_owner_never_adopts: bool = _rule(
        "An owner that meets the pin of a later epoch stops; it never takes that pin over.",
        "it adopts what stands there, and its delete then removes the living owner's pin",
        "publish",
        "",
        "late-writes",
        names.PIN_BEFORE_ENTRY,
        names.ABORTED_STAYS_KNOWN,
        names.READ_COMMITTED,
    )
    trim_below_pins: bool = _rule(
        "Nothing at or above the lowest pin is trimmed.",
        "retention alone decides",
        "trim",
        "",
        "takeover",
        names.SEALING_IRRELEVANT,
    )
    trim_data_first: bool = _rule(
        "Trim removes data first, then the aborted records below it.",
        "aborted records of closed ledgers go first",
        "trim",
        "",
        "takeover",
        names.ABORTED_STAYS_KNOWN,
    )
    gc_never_forces: bool = _rule(
        "A header is deleted only when no op record of it is left.",
        "it is deleted once it is old enough",
        "GC",
        "",
        "publish",
        names.GC_NEVER_FORCES,
    )
    gc_loads_owner: bool = _rule(
        "For ops left behind, GC asks the owner to scan again, loading the segment if need be.",
        "the ops wait until somebody loads the segment",
        "GC",
        "",
        "split",
        names.NO_LEAK,
    )
    wake_on_ceiling: bool = _rule(
        "A dispatcher at the ceiling is woken when the ceiling moves.",
        "only an append wakes it",
        "dispatch",
        "",
        "dispatch",
        names.NO_POLL,
    )
    cursor_fence: bool = _rule(
        "A cursor write is a compare-and-set with the owner's epoch; the loser stops.",
        "a former owner's cursor write overwrites the present owner's",
        "recovery of a subscription",
        "",
        "ack-takeover",
        names.INTENTS_OUTLIVE_CURSOR,
    )
    ops_before_cursor: bool = _rule(
        "Recovery of a subscription reads the ack ops before the cursor.",
        "the cursor is read first, before fence and ops",
        "recovery of a subscription",
        "",
        "ack-takeover",
        names.INTENTS_OUTLIVE_CURSOR,
    )
    subscription_recovers_first: bool = _rule(
        "Nothing is dispatched or acknowledged before a subscription has recovered.",
        "messages that a transaction holds are given out again",
        "recovery of a subscription",
        "",
        "ack-conflict",
        names.ALL_OR_NOTHING,
    )
    lease_check_before_answer: bool = _rule(
        "Between an ack's durable intent and its answer the owner checks that it holds its lease.",
        "a former owner says 'ok' to an ack that the present one has not read",
        "ack",
        "",
        "ack-conflict",
        names.ALL_OR_NOTHING,
    )
    named_op_keys: bool = _rule(
        "An ack op's key names the owner's epoch and a number.",
        "numbers start again with each owner: two puts meet under one key",
        "ack",
        "",
        "ack-takeover",
        names.INTENTS_OUTLIVE_CURSOR,
    )
    missing_header_drops_acks: bool = _rule(
        "Pending acks whose header is found missing are dropped: it was aborted, and a former "
        "owner deleted the ops.",
        "they wait for a decision that nobody can tell any more",
        "recovery of a subscription",
        "",
        "ack-takeover",
        names.NO_LEAK,
    )
    incarnation_checked: bool = _rule(
        "Ack ops of another incarnation of the cursor are dropped, not merged.",
        "an ack from before a seek is merged after it",
        "recovery of a subscription",
        "",
        "seek",
        names.ALL_OR_NOTHING,
    )
    group_decides_alone: bool = _rule(
        "Every decision on a member of a group is a compare-and-set on the group record.",
        "a deadline aborts a member in its header",
        "groups",
        "",
        "group-sequence",
        names.ONE_DECISION,
    )
    decided_ids_kept: bool = _rule(
        "The ids of sequence n are dropped only when n is rolled forward to their headers.",
        "committing n+1 drops them at once",
        "groups",
        "",
        "group-sequence",
        names.ONE_DECISION,
    )
    listed_all_open: bool = _rule(
        "COMMIT_GROUP with a listed transaction that is not open is refused; nothing is decided.",
        "those that are open are committed",
        "groups",
        "",
        "group-winners",
        names.ALL_OR_NOTHING,
    )
    group_before_header: bool = _rule(
        "A member's state is read from the group first, then from the header, which wins if final.",
        "the header is read first",
        "groups",
        "",
        "group-member",
        names.ONE_DECISION,
    )
    decided_before_epoch: bool = _rule(
        "A decided member is committed, whatever epoch the group has reached since.",
        "a member of an older epoch counts as aborted",
        "groups",
        "",
        "group-fencing",
        names.ONE_DECISION,
    )
    old_epochs_fenced: bool = _rule(
        "COMMIT_GROUP is refused to older epochs, in the same compare-and-set.",
        "a former run of the writer commits after the new one has begun",
        "groups",
        "",
        "group-fencing",
        names.ONE_DECISION,
    )


def _described() -> tuple[Rule, ...]:
    return tuple(Rule(switch.name, *switch.metadata["described"]) for switch in fields(Rules))


RULES: Final = _described()
