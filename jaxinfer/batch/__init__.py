"""Offline batches: a file of requests in, a file of answers out; killed at any point, they resume.

Plain Python, no JAX: a job drives whatever has `generate_each`, which `LLM` does.
"""

from jaxinfer.batch.errors import BatchError, BatchWriteError, RowError
from jaxinfer.batch.job import BatchSummary, Job, open_job

__all__ = ["BatchError", "BatchSummary", "BatchWriteError", "Job", "RowError", "open_job"]
