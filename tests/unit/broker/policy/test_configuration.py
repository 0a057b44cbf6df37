"""Settings that change while the broker runs: what is kept, refused, and passed over."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from magnetar.broker.policy.configuration import NAMES, BrokerConfiguration
from magnetar.broker.policy.defaults import PolicyDefaults
from magnetar.broker.policy.records import BROKER_CONFIGURATION
from magnetar.errors import CorruptMetadata, InvalidArgument, NotAllowed
from magnetar.testing.virtual.virtual_time import run
from tests.unit.broker.world import World

TTL = "ttlDurationDefaultInSeconds"


def test_names_are_those_of_pulsar() -> None:
    assert NAMES[TTL] == "ttl_duration_default_in_seconds"
    assert "brokerDeleteInactiveTopicsMaxInactiveDurationSeconds" in NAMES
    assert "defaultRetentionSizeInMB" not in NAMES


def test_what_was_changed_holds_after_a_restart() -> None:
    async def main() -> None:
        metadata = World().parts().metadata
        started_with = PolicyDefaults(ttl_duration_default_in_seconds=5)
        configuration = BrokerConfiguration(metadata, started_with)
        await configuration.load()
        await asyncio.gather(
            configuration.change(TTL, "7"), configuration.change("maxProducersPerTopic", "3")
        )
        again = BrokerConfiguration(metadata, started_with)
        await again.load()
        for each in (configuration, again):
            assert each.changed == {TTL: "7", "maxProducersPerTopic": "3"}
            assert each.defaults.ttl_duration_default_in_seconds == 7
            assert each.defaults.max_producers_per_topic == 3
        await again.change(TTL, None)
        await again.change(TTL, None)
        assert again.defaults.ttl_duration_default_in_seconds == 5

    run(main())


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        (TTL, "-1", InvalidArgument),
        (TTL, "1.5", InvalidArgument),
        (TTL, "9" * 5000, InvalidArgument),
        ("delayedDeliveryEnabled", "1", InvalidArgument),
        ("backlogQuotaDefaultRetentionPolicy", "shrug", InvalidArgument),
        ("port", "1", NotAllowed),
        ("ttl_duration_default_in_seconds", "1", NotAllowed),
    ],
)
def test_what_is_refused_changes_nothing(name: str, text: str, error: type[Exception]) -> None:
    async def main() -> None:
        metadata = World().parts().metadata
        configuration = BrokerConfiguration(metadata, PolicyDefaults())
        with pytest.raises(error):
            await configuration.change(name, text)
        assert configuration.changed == {}
        assert await metadata.get(BROKER_CONFIGURATION) is None

    run(main())


def test_what_is_no_longer_known_is_passed_over_and_damage_is_not() -> None:
    async def main() -> None:
        metadata = World().parts().metadata
        stored = {"changed": {"gone": "1", TTL: "soon", "maxProducersPerTopic": "3"}}
        await metadata.put(BROKER_CONFIGURATION, msgspec.json.encode(stored))
        configuration = BrokerConfiguration(metadata, PolicyDefaults())
        await configuration.load()
        assert configuration.defaults == PolicyDefaults(max_producers_per_topic=3)
        await metadata.put(BROKER_CONFIGURATION, b"{")
        with pytest.raises(CorruptMetadata):
            await configuration.load()

    run(main())
