"""Clusters, tenants and namespaces with their policies, as records of the metadata store.

Owns: `Namespaces`. Everything is read from the store when asked for: it is the only truth.

Invariants:
1. `public/default` and `pulsar/system` exist after `open`, with their tenants and this cluster.
2. A namespace is created only in an existing tenant. A tenant with namespaces is not deleted.
3. Nothing here knows of topics: whoever deletes a namespace has emptied it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from magnetar.broker.policy.effective import BROKER_POLICIES
from magnetar.broker.policy.policies import Policies
from magnetar.broker.policy.records import CLUSTERS, TENANTS, Directory, namespaces_directory
from magnetar.errors import NotAllowed, TopicNotFound
from magnetar.metadata.api import MetadataStore
from magnetar.model.names import DEFAULT_NAMESPACE, DEFAULT_TENANT, NamespaceName

# Both exist in every Pulsar cluster: clients use the first without asking, tools look for the
# second.
DEFAULT: Final = NamespaceName(DEFAULT_TENANT, DEFAULT_NAMESPACE)
SYSTEM: Final = NamespaceName("pulsar", "system")


class Tenant(msgspec.Struct, frozen=True, rename="camel"):
    """A tenant: who may administer its namespaces, and where they may be served."""

    admin_roles: list[str] = []
    allowed_clusters: list[str] = []


class Cluster(msgspec.Struct, frozen=True, rename="camel"):
    """The addresses at which a cluster is reached."""

    service_url: str = ""
    service_url_tls: str = ""
    broker_service_url: str = ""
    broker_service_url_tls: str = ""


class Namespaces:
    """All clusters, tenants and namespaces of one metadata store."""

    def __init__(
        self, metadata: MetadataStore, cluster: str, broker: Policies = BROKER_POLICIES
    ) -> None:
        self._metadata = metadata
        self.broker = broker
        """What holds where neither a topic nor its namespace sets it."""
        self.cluster = cluster
        """The cluster that this broker belongs to."""
        self.clusters = Directory(metadata, CLUSTERS, Cluster)
        self.tenants = Directory(metadata, TENANTS, Tenant)

    async def open(self, urls: Cluster | None = None) -> None:
        """Create what every cluster has; `urls` are kept up to date."""
        # The cluster is there since an earlier start: only its addresses may have changed.
        if not await self.clusters.create(self.cluster, urls or Cluster()) and urls is not None:
            await self.clusters.change(self.cluster, lambda _: urls)
        # Every broker does this at every start; what exists is left as it is.
        for namespace in (DEFAULT, SYSTEM):
            tenant = Tenant(admin_roles=[], allowed_clusters=[self.cluster])
            await self.tenants.create(namespace.tenant, tenant)
            await self.create(namespace)

    # --- namespaces

    async def exists(self, namespace: NamespaceName) -> bool:
        return await self._of(namespace.tenant).get(namespace.name) is not None

    async def names(self, tenant: str) -> list[NamespaceName]:
        """The namespaces of one tenant, sorted; TopicNotFound if there is no such tenant."""
        await self._check_tenant(tenant)
        return [NamespaceName(tenant, name) for name in await self._of(tenant).names()]

    async def policies(self, namespace: NamespaceName) -> Policies:
        """TopicNotFound if there is no such namespace."""
        found = await self._of(namespace.tenant).get(namespace.name)
        if found is None:
            raise _missing(namespace)
        return found

    async def create(self, namespace: NamespaceName, policies: Policies | None = None) -> bool:
        """False: it exists already, and was left as it is."""
        await self._check_tenant(namespace.tenant)
        given = policies or Policies()
        # As Pulsar: a namespace is served somewhere, by default where it was made.
        if not given.replication_clusters:
            given = msgspec.structs.replace(given, replication_clusters=[self.cluster])
        return await self._of(namespace.tenant).create(namespace.name, given)

    async def change(
        self, namespace: NamespaceName, change: Callable[[Policies], Policies]
    ) -> Policies:
        """Replace the policies; TopicNotFound if there is no such namespace."""
        found = await self._of(namespace.tenant).change(namespace.name, change)
        if found is None:
            raise _missing(namespace)
        return found

    async def delete(self, namespace: NamespaceName) -> bool:
        """False: there was none."""
        return await self._of(namespace.tenant).delete(namespace.name)

    async def delete_tenant(self, tenant: str) -> bool:
        """False: there was none. Refused while it has namespaces."""
        # Invariant 2: records of namespaces would be left without a tenant to find them by.
        if await self._of(tenant).names():
            raise NotAllowed(f"tenant {tenant} still has namespaces", hint="delete them first")
        return await self.tenants.delete(tenant)

    # --- parts

    def _of(self, tenant: str) -> Directory[Policies]:
        return Directory(self._metadata, namespaces_directory(tenant), Policies)

    async def _check_tenant(self, tenant: str) -> None:
        if await self.tenants.get(tenant) is None:
            raise TopicNotFound(f"tenant {tenant} does not exist", hint="create the tenant first")


def _missing(namespace: NamespaceName) -> TopicNotFound:
    return TopicNotFound(f"namespace {namespace} does not exist", hint="create it first")
