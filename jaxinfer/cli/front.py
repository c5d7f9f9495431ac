"""`jaxinfer front`: one address before several servers."""

import logging
import sys

from jaxinfer.cli.command import say
from jaxinfer.extras import install_hint
from jaxinfer.fleet.front.options import FrontOptions


def front(options: FrontOptions) -> int:
    """Put one address before several servers of one model.

    A stream whose server dies goes on at another one, token for token, and its client sees nothing of it; a whole
    answer is asked for again. Each replica is `jaxinfer serve MODEL --accept-sent-tokens`, with the same options. Keys
    are the replicas' (docs/scale_out.md).
    """
    try:
        from jaxinfer.fleet.front.run import run_front
    except ImportError as error:
        raise ImportError(f"jaxinfer front needs {error.name}: {install_hint('serve')}") from None
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jaxinfer").setLevel(logging.INFO)
    return run_front(options, lambda url: say(f"listening at {url}; {len(options.replicas or ())} replicas"))
