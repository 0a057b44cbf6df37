"""The module in which Spark finds `format("magnetar")`, source and sink, without registration."""

from magnetar.spark.data_source import MagnetarSource


# Spark imports every module called `pyspark_*` and registers the class of this name.
class DefaultSource(MagnetarSource):
    """Source and sink of Magnetar."""
