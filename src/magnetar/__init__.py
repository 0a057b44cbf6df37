"""Magnetar: event streaming with scalable topics and metadata-driven transactions."""
