"""The look at loaded topics from time to time: which are to be compacted by themselves.

Owns: `CompactionChecks`, one loop over all of them, and the pure `is_due`.

Invariants:
1. A topic is compacted when the log behind its compacted view has more bytes than its policy
   `compactionThreshold` says; 0: never. One after the other, in the order in which they are found.
   As long as there is a threshold, what was not compacted is kept, also if somebody has deleted
   the subscription that sees to it.
2. What keeps failing is tried again after pauses that double, an hour at most: a topic with too
   many keys must not be read as a whole every minute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from magnetar.broker.compact.compaction import Compaction
from magnetar.broker.topic.nonpersistent import LoadedTopic
from magnetar.broker.topic.quota_rules import bytes_from
from magnetar.broker.topic.topic import Topic
from magnetar.errors import MagnetarError
from magnetar.managed_ledger.ledger_list import LedgerSpan
from magnetar.model.ids import Position
from magnetar.model.names import TopicName
from magnetar.runtime.clock import Clock
from magnetar.runtime.limits import Limits
from magnetar.runtime.logs import logger
from magnetar.runtime.slices import SlicePace

_MS_PER_SECOND: Final = 1000
_PAUSE_SECONDS_MAX: Final = 3600.0
_DOUBLINGS_MAX: Final = 16
_LOG: Final = logger(__name__)


def is_due(spans: Iterable[LedgerSpan], horizon: Position | None, threshold: int) -> bool:
    """Whether so much stands behind the horizon that it is to be compacted."""
    start = Position(0, 0) if horizon is None else horizon.next
    return threshold > 0 and bytes_from(spans, start) > threshold


class CompactionChecks:
    """The automatic compactions of one broker."""

    def __init__(
        self, loaded: Mapping[TopicName, LoadedTopic], clock: Clock, limits: Limits
    ) -> None:
        self._loaded = loaded
        self._clock = clock
        self._seconds = limits.compaction_check_seconds

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._clock.sleep(self._seconds)
            pace = SlicePace()
            # A list: topics come and go in the pauses.
            for topic in list(self._loaded.values()):
                await pace.after()
                # Most topics have no threshold, and nothing else is looked at.
                if isinstance(topic, Topic) and topic.policies.compaction_threshold:
                    await self._look_at(topic)

    async def _look_at(self, topic: Topic) -> None:
        compaction = topic.compaction
        if compaction.running or topic.closing or topic.lost is not None:
            return
        try:
            await compaction.keep_all()
            if self._is_due(topic):
                compaction.begin()
                await compaction.ended()
        # Closed meanwhile, say; its next look comes.
        except MagnetarError as error:
            _LOG.warning("compaction-not-begun", topic=str(topic.name), error=str(error))

    def _is_due(self, topic: Topic) -> bool:
        threshold, compaction = topic.policies.compaction_threshold, topic.compaction
        horizon = None if topic.compacted is None else topic.compacted.horizon
        is_much = is_due(topic.ledger.ledger_spans, horizon, threshold)
        return is_much and self._may_retry(compaction)

    def _may_retry(self, compaction: Compaction) -> bool:
        report = compaction.report
        if not report.failures:
            return True
        doubled = self._seconds * (1 << min(report.failures - 1, _DOUBLINGS_MAX))
        since_s = (self._clock.now_ms() - report.failed_ms) / _MS_PER_SECOND
        return since_s >= min(doubled, _PAUSE_SECONDS_MAX)
