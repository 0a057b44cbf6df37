"""The table of endpoints, walked by every endpoint that upstream has: answered, or 501 and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.broker.policy.policies import Policies
from magnetar.server.admin.application import ENDPOINTS
from magnetar.server.admin.policies.table import POLICIES
from magnetar.server.authority import Action
from tests.meta.tree import ROOT
from tests.unit.server.admin.world import TOPIC, World, run

LIST = Path(__file__).with_name("upstream_endpoints.txt")
PAGE = ROOT / "docs" / "reference" / "admin-rest.md"

# What stands for a part of a path: nothing that would change what other requests see.
PARTS = {
    "t": "public",
    "n": "default",
    "topic": "none",
    "c": "here",
    "sub": "none",
    "bundle": "0x00000000_0xffffffff",
    "id": "1",
    "ms": "1000",
    "s": "1",
    "l": "0",
    "e": "0",
    "k": "1",
    "most": "1",
    "least": "1",
}
# By what stands before them: these answer 501, and say why.
UNBUILT = (
    "/admin/v2/(bookies|functions|metadata|resourcegroups|segments|worker)",
    "POST /admin/v2/resource-quotas$",
    "/admin/v2/brokers/shutdown",
    "/admin/v2/broker-stats/(?!topics$|load-report$)",
    "/admin/v2/clusters/{c}/(migrate|.*/{.}$|.*/brokers/{b})",
    "POST /admin/v2/clusters/{c}/peers",
    "/admin/v2/namespaces/(grant|revoke)",
    "/admin/v2/namespaces/{t}/{n}/(permissions|entryFilters|resourcegroup|migration)",
    "/admin/v2/namespaces/{t}/{n}/{bundle}(/topicHashPositions)?$",
    "{topic}/(permissions|entryFilters|shadowTopics|offload$|backlog$)",
    "POST .*/replicatedSubscriptionStatus",
    "/admin/v2/schemas/.*/metadata",
    "/admin/v3/(functions|sinks|sources|packages)",
    "/admin/v3/transactions/(positionStatsInPendingAck|transactionCoordinator)",
)


def upstream() -> Iterator[tuple[str, str]]:
    for line in LIST.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            methods, path = line.split()
            for method in methods.split(","):
                yield method, path


def is_unbuilt(method: str, path: str) -> bool:
    return any(re.search(each, f"{method} {path}") for each in UNBUILT)


def test_every_endpoint_of_upstream_is_answered_or_501_with_a_reason(tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    wrong: list[str] = []

    async def scenario(world: World) -> None:
        for method, path in upstream():
            asked = re.sub(r"{(\w+)}", lambda part: PARTS.get(part[1], "none"), path)
            answer = await world.ask(method, asked)
            found["unbuilt" if answer.status == 501 else "answered"] += 1
            says_why = answer.status < 400 or bool(answer.body["reason"])
            # 404 tells of what there is not (a topic, a role), never of the path; and a request
            # without its body is refused, or the method would not be there at all.
            bare = "there is no /admin" in str(answer.body) or "does not take" in str(answer.body)
            is_right = (answer.status == 501) == is_unbuilt(method, path)
            if bare or not says_why or not is_right or answer.status == 500:
                wrong.append(f"{method} {path}: {answer.status} {answer.data[:120]!r}")

    run(tmp_path, scenario)
    assert not wrong, "\n".join(wrong)
    assert found["answered"] + found["unbuilt"] == len(list(upstream()))
    assert found["answered"] >= 400, found


def test_the_list_has_no_endpoint_twice() -> None:
    assert len(set(upstream())) == len(list(upstream()))


def test_every_row_says_what_its_request_must_be_allowed() -> None:
    for row in ENDPOINTS:
        # A look needs one right; what may change something, every right that there is.
        assert row.actions == tuple(Action) or (row.method == "GET" and len(row.actions) == 1), row
        assert bool(row.unbuilt) == (row.handler.__name__ == "not_built"), row


def test_every_policy_of_the_table_is_a_field_and_has_its_rows() -> None:
    fields = set(Policies.__struct_fields__)
    rows = Counter(row.policy for row in ENDPOINTS if row.policy)
    assert rows.keys() <= fields
    assert {policy.field for policy in POLICIES} <= rows.keys()


def test_every_endpoint_is_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    missing = []
    for row in ENDPOINTS:
        # The last word of its path that is no name of a part.
        words = [each for each in re.sub(r"{[^}]*(}\$)?}", "", row.path).split("/") if each]
        if row.unbuilt is None and words and words[-1] not in page:
            missing.append(row.path)
        if row.unbuilt is not None and row.unbuilt not in page:
            missing.append(f"{row.path}: {row.unbuilt}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "namespaces/public/default/shoeSize", 404),
        ("POST", f"{TOPIC}/shoeSize", 404),
        ("PATCH", f"{TOPIC}/messageTTL", 405),
        ("GET", "clusters/there/peers", 404),
        ("PUT", "namespaces/public/default/0x00000000_0x7fffffff/unload", 412),
    ],
)
def test_what_upstream_has_not_either(tmp_path: Path, method: str, path: str, status: int) -> None:
    async def scenario(world: World) -> None:
        await world.refuse(status, method, path)

    run(tmp_path, scenario)
