"""Capacity on paper: a fleet's engines over a trace of requests, in modelled time. Nothing is computed."""
