"""outrider.ray:app, an application of Ray Serve with the routes of `outrider serve` (docs/replicas.md).

    serve run outrider.ray:app model=MODEL replicas=2

Importing this package needs no Ray; building the application does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

NEEDS = "this needs Ray: pip install 'outrider[ray]' (in a clone: '.[ray]')"


def app(args: dict[str, Any]) -> Application:
    """Build the application. `args`: flags of `outrider serve`, by their names, and settings of `RayConfig`."""
    try:
        from outrider.ray.application import application_from
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "ray":
            raise
        raise ValueError(NEEDS) from None
    return application_from(args)
