"""Spark on Magnetar: source, sink, and the pipelines that a file describes.

Needs the extra `spark` (PySpark >= 4.2, pyarrow) and a Java, which `magnetar.spark.java` finds.
"""
