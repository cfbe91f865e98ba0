"""Generation from a bundle: draft, verify, accept, commit, emit."""

from mtp_engines.backends import EngineOptions
from mtp_runtime.api import Model, load
from mtp_runtime.events import Emitted, Event, Finished
from mtp_runtime.request import Request

__all__ = ["Emitted", "EngineOptions", "Event", "Finished", "Model", "Request", "load"]
