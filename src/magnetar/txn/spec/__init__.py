"""The transaction protocol as an executable model (pure).

`rules` names what an implementation must obey, `state` the records and what owners keep in memory,
`actions` the steps, each of them one durable write, one read or one step in memory; `machine` puts
them together. `names` and `invariants` hold the twelve promises, `world` and `scenarios` the
bounded worlds, `explore` visits every state of one, up to symmetry. `describe` writes
docs/reference/transactions.md.
"""
