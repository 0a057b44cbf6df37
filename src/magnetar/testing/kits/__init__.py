"""Conformance kits: what every backend of a contract must do, as classes of tests to inherit."""
