"""Spark on Magnetar: source, sink, and the pipelines that a file describes.

Needs the extra `spark` (PySpark >= 4.2, pyarrow) and a Java, which
`magnetar.spark.pipeline.java` finds.
"""

from magnetar.spark.registration import register
from magnetar.spark.sink.foreach_batch import foreach_batch_writer

__all__ = ["foreach_batch_writer", "register"]
