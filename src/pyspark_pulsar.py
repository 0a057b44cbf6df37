"""Where Spark looks for the source and sink `format("pulsar")`: those of Magnetar."""

from magnetar.spark.data_source import MagnetarSource


class DefaultSource(MagnetarSource):
    """Source and sink of Magnetar, under the name that queries for Pulsar use."""

    @classmethod
    def name(cls) -> str:
        return "pulsar"
