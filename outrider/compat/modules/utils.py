"""outrider.utils: a module of vLLM that is not here."""

from outrider.compat.not_here import not_here

raise not_here(__name__, "it has vLLM's own helpers; a request id is any text, such as uuid.uuid4().hex")
