"""A checkpoint consumer: the application keeps the place itself, and resumes from it.

Owns: `CheckpointConsumer`, alone or as a member of a group, as an application uses it;
`CheckpointCore` does the work. `FROM_EARLIEST` and `FROM_LATEST`, where one may begin.

Invariants:
1. A segment is read after all its parents were read to their end, so a key's messages come in
   order. (In a group the controller sees to that.)
2. `checkpoint` names every segment that this consumer knows, silent ones too, at what the
   application has received: whoever starts there gets exactly the rest.
"""

from __future__ import annotations

from typing import Final, TypeVar

from magnetar.client.consume.core.checkpoint_core import CheckpointCore
from magnetar.client.consume.receiving import Receiving
from magnetar.client.message.message import Checkpoint
from magnetar.model.ids import CheckpointKind

T = TypeVar("T")

FROM_EARLIEST: Final = Checkpoint(CheckpointKind.EARLIEST)
FROM_LATEST: Final = Checkpoint(CheckpointKind.LATEST)


class CheckpointConsumer(Receiving[T]):
    """Reads from a checkpoint, and tells where it is.

    async with await client.checkpoint_consumer(topic, start=stored or FROM_EARLIEST) as consumer:
        while batch := await consumer.receive_many(1000, timeout=1.0):
            save(batch, consumer.checkpoint().to_bytes())
    """

    _core: CheckpointCore[T]

    def __init__(self, core: CheckpointCore[T]) -> None:
        super().__init__(core)

    @property
    def topic(self) -> str:
        """The topic that it reads, by its full name."""
        return self._core.topic

    def checkpoint(self) -> Checkpoint:
        """Where the application is: a consumer that starts there gets exactly the rest."""
        return self._core.checkpoint()
