"""Offline batches: a file of requests in, a file of answers out, resumable after a kill at any point.

Plain Python without JAX: a job runs on any model with `generate_each`, such as `LLM`.
"""

from jaxinfer.batch.errors import BatchError, BatchWriteError, RowError
from jaxinfer.batch.job import BatchSummary, Job, open_job

__all__ = ["BatchError", "BatchSummary", "BatchWriteError", "Job", "RowError", "open_job"]
