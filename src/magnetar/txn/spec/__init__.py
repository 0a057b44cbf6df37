"""The transaction protocol as an executable model (pure).

`rules` names what an implementation must obey, `state` the records and what owners keep in memory,
`publishing`, `owning`, `acking`, `cursors`, `deciding` and `groups` the actions, each of them one
durable write, one read or one step in memory. `invariants` holds the twelve promises, `scenarios`
the bounded worlds, `explore` visits every state of such a world. `describe` writes the tables and
diagrams of docs/reference/transactions.md.
"""
