"""outrider.envs: a module of vLLM that is not here."""

from outrider.compat.not_here import not_here

raise not_here(__name__, "settings are arguments of LLM and flags of the commands")
