"""Layout changes killed at their steps: a sample passes, and broken rules are caught."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.crash.scalable import child
from harness.crash.scalable.check import compare
from harness.crash.scalable.child import CHANGES, start_fork_server
from harness.crash.scalable.run import WITHIN_SECONDS, Case, ChangeOutcome, ScalableKills
from harness.limits import LimitExpired
from magnetar.broker.publish.lineage import Lineage
from magnetar.model.names import TopicName
from magnetar.scalable.layout.layout_changes import LayoutChanges
from magnetar.scalable.layout.segments import LocalSegments
from magnetar.scalable.records import ScalableRecord
from magnetar.scalable.store import ScalableStore

SEED = 5


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> None:
    """It outlives the tests that use it, with two descriptors."""
    start_fork_server("pytest", "harness.crash.scalable.run")


def _run(
    folder: Path,
    every: int,
    *changes: str,
    seed: int = SEED,
) -> dict[str, ChangeOutcome]:
    kills = ScalableKills(folder, seed, changes=changes, every=every)
    return asyncio.run(kills.run())


# --- the whole, with real processes


@pytest.mark.slow
def test_sample_of_kills(tmp_path: Path) -> None:
    outcomes = _run(tmp_path, 50, *CHANGES)  # `make test` has every tenth, too
    for outcome in outcomes.values():
        assert outcome.violations == []
        assert outcome.finished
        assert outcome.undone, "the first step is the intent: torn, it never was"
        assert outcome.slowest <= WITHIN_SECONDS


@pytest.mark.slow
def test_a_segment_may_have_few_messages(tmp_path: Path) -> None:
    """With this seed one of those that are merged has two: they are not both acknowledged."""
    outcome = _run(tmp_path, 50, "merge", seed=504245)["merge"]
    assert outcome.violations == []
    assert outcome.finished


def _no_lineage() -> None:
    async def forgets(self: LocalSegments, name: TopicName, lineage: Lineage) -> None:
        """Children know nothing of their parents."""

    LocalSegments.inherit = forgets  # type: ignore[method-assign]


def _no_cleaning() -> None:
    async def keeps(self: ScalableStore, topic: TopicName) -> None:
        """What stood beside the topic's record stays."""

    ScalableStore.forget = keeps  # type: ignore[method-assign]


def _no_resumption() -> None:
    """Only changes that were begun by the same process are carried out."""
    begun: set[str] = set()
    carry_out = LayoutChanges.carry_out
    change_topic, create = ScalableStore.change_topic, ScalableStore.create

    async def create_and_note(self: ScalableStore, record: ScalableRecord) -> None:
        begun.add(record.name)
        await create(self, record)

    async def change_and_note(
        self: ScalableStore,
        topic: TopicName,
        change: Callable[[ScalableRecord], ScalableRecord | None],
    ) -> ScalableRecord | None:
        begun.add(str(topic))
        return await change_topic(self, topic, change)

    async def carry_out_own(self: LayoutChanges, record: ScalableRecord) -> ScalableRecord | None:
        return await carry_out(self, record) if record.name in begun else record

    ScalableStore.create = create_and_note  # type: ignore[method-assign]
    ScalableStore.change_topic = change_and_note  # type: ignore[method-assign]
    LayoutChanges.carry_out = carry_out_own  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "kind", "text"),
    [
        (_no_lineage, "merge", "was stored again"),
        (_no_cleaning, "delete", "is left"),
        (_no_resumption, "delete", "delete at delete"),
    ],
)
def test_broken_rules_are_caught(
    tmp_path: Path, plant: Callable[[], None], kind: str, text: str
) -> None:
    def is_caught(outcome: ChangeOutcome) -> bool:
        return any(text in each for each in outcome.violations)

    kills = ScalableKills(tmp_path, SEED, changes=[kind], every=30, plant=plant, reaches=is_caught)
    outcome = asyncio.run(kills.run())[kind]
    assert is_caught(outcome), outcome.violations


@pytest.mark.slow
@pytest.mark.parametrize("planted", [True, False])
def test_kills_go_on_until_they_have_met_what_they_were_made_to_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """The step that a broken rule needs may be none of those that are tried first."""
    killed: list[Case] = []

    async def kill(self: ScalableKills, case: Case, prepared: object) -> bool:
        killed.append(case)
        self.outcomes["delete"].finished += planted and case.step == 7
        return case.step > 9

    monkeypatch.setattr(ScalableKills, "_kill", kill)
    outcome = ScalableKills(
        tmp_path, SEED, changes=["delete"], every=30, reaches=lambda each: each.finished > 0
    )
    violations = asyncio.run(outcome.run())["delete"].violations
    steps = sorted({each.step for each in killed})
    assert steps == [*range(1, 8 if planted else 11), 31]
    assert len(set(killed)) == len(killed)
    assert bool(violations) != planted


@pytest.mark.slow
def test_an_expired_limit_is_no_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is too slow to answer ends the run, also where a broken rule is looked for."""
    kills = ScalableKills(tmp_path, SEED, changes=["delete"], every=30, plant=_no_resumption)
    monkeypatch.setattr(child, "_ANSWER_SECONDS", 0.001)
    with pytest.raises(LimitExpired, match=r"limit of 0\.001 s expired: readiness"):
        asyncio.run(kills.run())
    assert kills.outcomes["delete"].violations == []


# --- the comparison


def test_what_a_subscription_is_given_is_compared() -> None:
    keys = {0: "a", 1: "b", 2: "a"}
    assert compare(keys, {0, 1, 2}, [0, 2, 1]) == []
    assert compare(keys, {0, 1, 2}, [0, 1]) == ["2 is lost"]
    assert compare(keys, {1, 2}, [0, 1, 2]) == ["0 came, unasked for"]
    assert compare(keys, {0, 1, 2}, [0, 1, 1, 2]) == ["1 came 2 times"]
    assert compare(keys, {0, 1, 2}, [2, 0, 1]) == ["0 came after 2, of the same key"]
