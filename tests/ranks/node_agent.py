"""A node's agent, as a script: MODEL and the settings as JSON. It imports little, since its ranks import it too."""

import json
import sys

from outrider.config import EngineConfig
from outrider.engine.hosts.host_agent import host_ranks

if __name__ == "__main__":
    try:
        host_ranks(EngineConfig(sys.argv[1], **json.loads(sys.argv[2])), lambda text: print(text, flush=True))
    except ValueError as error:
        print(error, flush=True)
        sys.exit(1)
