"""The client of Magnetar and of Apache Pulsar: asyncio first, with a blocking façade."""
