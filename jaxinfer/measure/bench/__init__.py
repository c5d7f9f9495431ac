"""Measuring a model on this machine: latency, throughput, load, and the roofline that was measured beside them."""
