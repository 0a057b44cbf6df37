"""The write-ahead journal that makes every embedded backend durable."""
