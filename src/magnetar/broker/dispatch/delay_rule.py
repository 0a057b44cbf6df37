"""Pure: the rule by which messages wait for their time of delivery on one topic.

Owns: `DelayRule`: the policy in force, with what the broker alone decides.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from magnetar.broker.policy.values import DelayedDeliveryPolicies


class DelayRule(NamedTuple):
    """The rule for messages that are to be delivered later."""

    # Defaults of Pulsar's broker.
    active: bool = True
    """False: they are delivered at once."""
    tick_ms: int = 1000
    strict: bool = False
    """True: none is delivered before its time; else a tick before it at most."""
    fixed_delay_entries: int = 50_000
    """So many that are equally late are read ahead; 0: all."""

    @property
    def step_ms(self) -> int:
        """The largest power of two that is not above the tick."""
        return 1 << max(self.tick_ms, 1).bit_length() - 1

    def is_due(self, deliver_at_ms: int, now_ms: int) -> bool:
        early_ms = 0 if self.strict else self.tick_ms
        return not self.active or deliver_at_ms <= now_ms + early_ms

    def under(self, policy: DelayedDeliveryPolicies) -> DelayRule:
        """What holds for a topic, where this is the broker's."""
        tick_ms = policy.tick_time or self.tick_ms
        return DelayRule(policy.active, tick_ms, self.strict, self.fixed_delay_entries)


BROKER_DELAYS: Final = DelayRule()
"""Of a broker without settings."""
