"""The module in which Spark finds `format("pulsar")`: source and sink are those of Magnetar."""

from magnetar.spark.data_source import MagnetarSource


# Spark imports every module called `pyspark_*` and registers the class of this name.
class DefaultSource(MagnetarSource):
    """Source and sink of Magnetar, under the name that queries for Pulsar use."""

    @classmethod
    def name(cls) -> str:
        return "pulsar"
