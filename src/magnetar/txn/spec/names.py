"""Names of the twelve invariants of transactions (pure).

They stand apart so that rules, checks and tests use one spelling.
"""

from __future__ import annotations

from typing import Final

READ_COMMITTED: Final = "1 read committed"
ONE_DECISION: Final = "2 one decision"
ALL_OR_NOTHING: Final = "3 all or nothing"
PIN_BEFORE_ENTRY: Final = "4 pin before entry"
GATE: Final = "5 gate"
ABORTED_STAYS_KNOWN: Final = "6 aborted stays known"
INTENTS_OUTLIVE_CURSOR: Final = "7 ack intents outlive the cursor"
GC_NEVER_FORCES: Final = "8 GC never forces"
FENCE: Final = "9 fence"
SEALING_IRRELEVANT: Final = "10 sealing is irrelevant"
NO_POLL: Final = "11 no poll, no spin"
NO_LEAK: Final = "12 no leak"
