"""outrider.assets: a module of vLLM that is not here."""

from outrider.compat.not_here import not_here
from outrider.compat.settings import NO_IMAGES

raise not_here(__name__, NO_IMAGES)
