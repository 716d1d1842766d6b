"""outrider.platforms: a module of vLLM that is not here."""

from outrider.compat.not_here import not_here

raise not_here(__name__, "choose a device with device=")
