"""Where Spark looks for the source and sink `format("magnetar")`, which need no registration."""

from magnetar.spark.data_source import MagnetarSource


class DefaultSource(MagnetarSource):
    """Source and sink of Magnetar."""
