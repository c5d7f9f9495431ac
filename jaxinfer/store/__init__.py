"""Models by name: repositories of the hub that were pulled, aliases, files, embedded models.

Files of repositories are kept in the hub's cache, as `huggingface_hub` writes it, so that other tools share them. The
folder `home()` has a manifest of each pulled model, and the aliases.
"""

from jaxinfer.store.aliases import Alias, read_alias, write_alias
from jaxinfer.store.contents import StoredModel, copy_model, disk_usage, list_models, show_model
from jaxinfer.store.names import FoundModel, UnknownModelError, alias_options, find_model, find_path, prepare, pull
from jaxinfer.store.pull import Download
from jaxinfer.store.pulled import HubName, PulledFile, PulledModel, StoreError, home
from jaxinfer.store.remove import Removed, remove

__all__ = [
    "Alias",
    "Download",
    "FoundModel",
    "HubName",
    "PulledFile",
    "PulledModel",
    "Removed",
    "StoreError",
    "StoredModel",
    "UnknownModelError",
    "alias_options",
    "copy_model",
    "disk_usage",
    "find_model",
    "find_path",
    "home",
    "list_models",
    "prepare",
    "pull",
    "read_alias",
    "remove",
    "show_model",
    "write_alias",
]
