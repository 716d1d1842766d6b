"""outrider.distributed: a module of vLLM that is not here."""

from outrider.compat.not_here import not_here
from outrider.compat.settings import ONE_DEVICE

raise not_here(__name__, ONE_DEVICE)
