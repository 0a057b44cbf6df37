"""Scalable topics: topics made of key-range segments that split and merge while in use."""
