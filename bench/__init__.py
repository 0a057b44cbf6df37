"""Measures Magnetar against bare loops: `make bench`, compared by `make bench-diff`."""
