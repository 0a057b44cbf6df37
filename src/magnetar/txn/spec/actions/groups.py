"""Transaction groups: one record decides on all members (pure).

Owns: OPEN_GROUP, COMMIT_GROUP, aborts of members and the roll-forward of a decision to headers.
COMMIT_GROUP and aborts are jobs: read the group record, judge, write it by compare-and-set, and
begin again if another was faster. Two coordinators at work are two jobs.
"""

from __future__ import annotations

from magnetar.txn.spec.state import (
    ABORTED,
    COMMITTED,
    OPEN,
    UNKNOWN,
    Group,
    Job,
    State,
    put,
)
from magnetar.txn.spec.world import Actions, Steps, World, verdict

ACTIONS = Actions("coordinator")


@ACTIONS("group.open", "write", "OPEN_GROUP by a new run: epoch + 1, older epochs are fenced")
def group_open(world: World, state: State) -> Steps:
    if state.budget.opens:
        # Whatever the older epoch has decided stays; what it has not is aborted by this one write.
        group = state.group._replace(epoch=state.group.epoch + 1)
        budget = state.budget._replace(opens=state.budget.opens - 1)
        yield f"epoch {group.epoch}", state._replace(group=group, budget=budget)


@ACTIONS("group.read", "read", "COMMIT_GROUP, or an abort of a member, reads the group record")
def group_read(world: World, state: State) -> Steps:
    for at, job in enumerate(state.jobs):
        # A member of an epoch begins after that epoch was opened.
        if job.stage == "idle" and job.epoch <= state.group.epoch:
            judged = job._replace(stage=_judge(world, state.group, job), read=state.group)
            yield _name(job), state._replace(jobs=put(state.jobs, at, judged))


def _judge(world: World, group: Group, job: Job) -> str:
    """'read' if there is something to write, else 'done' (replayed, refused or too late)."""
    # Without the rule a commit is judged as if its own epoch were still the present one.
    unfenced = job.kind == "commit" and not world.rules.old_epochs_fenced
    judged = group._replace(epoch=job.epoch) if unfenced else group
    is_open = [verdict(world, judged, txn) == OPEN for txn in job.txns]
    # One that is over refuses the whole commit: those listed win together or not at all.
    enough = all(is_open) if world.rules.listed_all_open else any(is_open)
    return "read" if enough else "done"


@ACTIONS("group.roll", "write", "COMMIT_GROUP n+1 first copies n's commits to their headers")
def group_roll(world: World, state: State) -> Steps:
    for job in state.jobs:
        # A step for each header: a reader may come between any two of them.
        if job.kind == "commit" and job.stage == "read":
            for txn in job.read.decided:
                if state.headers[txn] == OPEN:
                    headers = put(state.headers, txn, COMMITTED)
                    yield f"{_name(job)}: t{txn}", state._replace(headers=headers)


@ACTIONS("group.decide", "write", "compare-and-set of the group record: the decision")
def group_decide(world: World, state: State) -> Steps:
    for at, job in enumerate(state.jobs):
        if job.stage != "read" or not _may_decide(world, state, job):
            continue
        # Another job was faster: the compare-and-set fails, and everything is read anew.
        if state.group != job.read:
            again = job._replace(stage="idle")
            yield f"{_name(job)}, lost", state._replace(jobs=put(state.jobs, at, again))
            continue
        jobs = put(state.jobs, at, job._replace(stage="done"))
        yield _name(job), state._replace(group=_decided(world, state.group, job), jobs=jobs)


def _may_decide(world: World, state: State, job: Job) -> bool:
    if job.kind == "abort":
        return world.rules.group_decides_alone
    # The write will forget these ids: their headers must say it first.
    rolled = all(state.headers[txn] != OPEN for txn in job.read.decided)
    return rolled or not world.rules.decided_ids_kept


def _decided(world: World, group: Group, job: Job) -> Group:
    if job.kind == "abort":
        return group._replace(aborted=tuple(sorted({*group.aborted, *job.txns})))
    sequence = world.scenario.members[job.txns[0]][1]
    # A later sequence is not decided by this commit, so its aborted members stay named.
    later = tuple(txn for txn in group.aborted if world.scenario.members[txn][1] > sequence)
    winners = tuple(txn for txn in job.txns if txn not in group.aborted)
    return Group(group.epoch, sequence, winners, later)


@ACTIONS("group.abort-header", "write", "(only without group_decides_alone) a header is aborted")
def group_abort_header(world: World, state: State) -> Steps:
    if world.rules.group_decides_alone:
        return
    for at, job in enumerate(state.jobs):
        if job.kind == "abort" and job.stage == "read":
            jobs = put(state.jobs, at, job._replace(stage="done"))
            headers = state.headers
            if headers[job.txns[0]] == OPEN:
                headers = put(headers, job.txns[0], ABORTED)
            yield _name(job), state._replace(headers=headers, jobs=jobs)


@ACTIONS("copy.read", "read", "a roll-forward reads what the group says of a member")
def copy_read(world: World, state: State) -> Steps:
    if not world.scenario.members:
        return
    for txn, header in enumerate(state.headers):
        # Read in one step, written in another: the record may move on in between, but what it once
        # said of a member stays true.
        said = verdict(world, state.group, txn)
        if header == OPEN and state.copies[txn] == UNKNOWN and said != OPEN:
            yield f"t{txn}: {said}", state._replace(copies=put(state.copies, txn, said))


@ACTIONS("copy.write", "write", "and copies it to the header: OPEN -> that, by compare-and-set")
def copy_write(world: World, state: State) -> Steps:
    for txn, copy in enumerate(state.copies):
        if copy != UNKNOWN:
            headers = state.headers
            # Somebody else has copied it: the compare-and-set loses, and nothing is left to do.
            if headers[txn] == OPEN:
                headers = put(headers, txn, copy)
            copies = put(state.copies, txn, UNKNOWN)
            yield f"t{txn}: {copy}", state._replace(headers=headers, copies=copies)


def _name(job: Job) -> str:
    listed = ", ".join(f"t{txn}" for txn in job.txns)
    return f"{job.kind} {listed} (epoch {job.epoch})"
