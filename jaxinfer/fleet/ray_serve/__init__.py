"""A fleet as an application of Ray Serve: replicas that Ray places, restarts and updates, behind the front."""
