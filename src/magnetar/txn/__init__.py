"""Transactions: the specification (`spec`), and what carries it out.

`magnetar.txn.spec` is the protocol as an executable model; the rest of the package follows it.
"""
