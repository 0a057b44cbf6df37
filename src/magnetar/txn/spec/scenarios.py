"""The bounded worlds that are explored whole (pure).

Owns: `SCENARIOS`. Together they use every action. Each is as small as what it is about allows, and
takes seconds; the `LARGE` ones join what the others look at apart, and take up to a minute.
"""

from __future__ import annotations

from typing import Final

from magnetar.txn.spec.state import Budget
from magnetar.txn.spec.world import Scenario

# `states` is the exact count: a test explores each and compares, so that a change of the model that
# loses or adds behaviour is noticed.
_SMALL = (
    Scenario(
        "publish",
        "Two transactions write to one segment beside plain messages; no faults.",
        txns=2,
        sends=((1,),) * 2,
        budget=Budget(plains=1),
        symmetric=True,
        states=9_054,
    ),
    Scenario(
        "dispatch",
        "Two transactions and a plain message before a dispatcher that sleeps and is woken.",
        txns=2,
        sends=((1,),) * 2,
        budget=Budget(plains=1),
        dispatch=True,
        symmetric=True,
        states=31_763,
    ),
    Scenario(
        "store-failures",
        "One transaction with a message and an ack whose metadata writes fail.",
        sends=((1,),),
        acks=(1,),
        messages=1,
        budget=Budget(failures=1),
        states=511,
    ),
    Scenario(
        "takeover",
        "One transaction, two messages, a plain one; a new owner comes while the former one goes "
        "on; trim.",
        sends=((2,),),
        budget=Budget(loads=1, plains=1, trims=1),
        zombies=True,
        states=22_897,
    ),
    Scenario(
        "late-writes",
        "One transaction, two messages; two owner changes and a crash, a zombie with late writes.",
        sends=((2,),),
        budget=Budget(loads=2, crashes=1),
        zombies=True,
        states=45_914,
    ),
    Scenario(
        "late-adoption",
        "One transaction, two messages, three owner changes; what a zombie writes last is adopted.",
        sends=((2,),),
        budget=Budget(loads=3),
        zombies=True,
        states=40_933,
    ),
    Scenario(
        "split",
        "One transaction over a segment that is sealed and its child; crashes of either owner.",
        sends=((1, 1),),
        budget=Budget(seals=1, crashes=1),
        child=True,
        states=2_062,
    ),
    Scenario(
        "acks",
        "Two transactions acknowledge two messages; cursor writes overlap.",
        txns=2,
        sends=((0,),) * 2,
        acks=(1, 1),
        messages=2,
        budget=Budget(cursor_crashes=1),
        symmetric=True,
        states=12_924,
    ),
    Scenario(
        "ack-takeover",
        "A transaction acknowledges two messages; a new owner comes while the former one goes on.",
        acks=(2,),
        messages=2,
        budget=Budget(cursor_loads=1),
        zombies=True,
        states=6_981,
    ),
    Scenario(
        "ack-conflict",
        "Two transactions want one message; a new owner comes while the former one goes on.",
        txns=2,
        sends=((0,),) * 2,
        acks=(1, 1),
        messages=1,
        budget=Budget(cursor_loads=1),
        zombies=True,
        symmetric=True,
        states=29_189,
    ),
    Scenario(
        "seek",
        "A transaction acknowledges; a seek and an owner change come in between.",
        acks=(2,),
        messages=2,
        budget=Budget(cursor_loads=1, seeks=1),
        zombies=True,
        states=25_741,
    ),
    Scenario(
        "group-sequence",
        "Two members of a group in consecutive sequences; either may be aborted.",
        txns=2,
        sends=((0,),) * 2,
        members=((1, 1), (1, 2)),
        abortable=(0, 1),
        states=4_363,
    ),
    Scenario(
        "group-attempts",
        "Two attempts of one sequence; either may win, or be aborted.",
        txns=2,
        sends=((0,),) * 2,
        members=((1, 1), (1, 1)),
        abortable=(0, 1),
        states=3_636,
    ),
    Scenario(
        "group-winners",
        "Two members that are committed together or not at all; either may be aborted before.",
        txns=2,
        sends=((0,),) * 2,
        members=((1, 1), (1, 1)),
        listed=((0, 1),),
        abortable=(0, 1),
        states=523,
    ),
    Scenario(
        "group-fencing",
        "Members of one sequence in two epochs; a new run fences the old one.",
        txns=2,
        sends=((0,),) * 2,
        members=((1, 1), (2, 1)),
        abortable=(0,),
        budget=Budget(opens=1),
        states=949,
    ),
    Scenario(
        "group-restart",
        "A new run commits the next sequence while the old run's last one is rolled forward.",
        txns=2,
        sends=((0,),) * 2,
        members=((1, 1), (2, 2)),
        abortable=(0, 1),
        budget=Budget(opens=1),
        states=5_873,
    ),
    Scenario(
        "group-member",
        "A segment follows a member of a sequence while the next sequence commits.",
        txns=2,
        sends=((1,), (0,)),
        members=((1, 1), (1, 2)),
        states=1_733,
    ),
)
# Two things at once, for interactions that the small worlds cannot have.
_LARGE = (
    Scenario(
        "consume-produce",
        "One transaction acknowledges and publishes; segment and subscription change owners.",
        sends=((1,),),
        acks=(1,),
        messages=1,
        budget=Budget(loads=1, cursor_loads=1),
        zombies=True,
        states=94_360,
    ),
    Scenario(
        "takeover-pair",
        "Two transactions, one message each; a new owner comes while the former one goes on.",
        txns=2,
        sends=((1,),) * 2,
        budget=Budget(loads=1),
        zombies=True,
        symmetric=True,
        states=243_842,
    ),
    Scenario(
        "split-pair",
        "Two transactions over a sealed segment and its child.",
        txns=2,
        sends=((1, 1),) * 2,
        budget=Budget(seals=1),
        child=True,
        symmetric=True,
        states=247_619,
    ),
)
LARGE: Final = frozenset(scenario.name for scenario in _LARGE)
SCENARIOS: Final = {scenario.name: scenario for scenario in (*_SMALL, *_LARGE)}
