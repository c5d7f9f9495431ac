"""A front before several servers of one model: streams that outlive the server that began them."""
