"""Legacy transactions: decided in a coordinator's log, ended by markers in the stream (PIP-31)."""
