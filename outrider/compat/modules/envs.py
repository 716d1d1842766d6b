"""Stands for `vllm.envs`, the environment variables of vLLM. Outrider reads none of them: using a name raises an error
that says which argument to use."""

from outrider.compat.environment import VARIABLES

VLLM_USE_V1 = True  # scripts ask for it, and there is one engine


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"{__name__}.{name} is not supported: "
                         f"{VARIABLES.get(name, 'settings are arguments of LLM and flags of the commands')}")
