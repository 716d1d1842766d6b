"""Fetches the files of a model id of the Hugging Face hub into the cache of huggingface_hub (HF_HOME).

HF_HUB_OFFLINE and the library's tokens and mirrors work as usual. Only what a model needs is fetched."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from outrider.models.sources.model_source import SourceError

WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
DESCRIPTIONS = ["*.json", "*.jinja"]
LOCAL = "Or give a local folder or .gguf file."


def hub_folder(model: str, revision: str | None = None, weights: bool = True,
               download_dir: str | None = None) -> Path:
    """Return the local folder of a hub id, fetched if needed. `download_dir`: used instead of the hub's cache
    folder."""
    patterns = DESCRIPTIONS + WEIGHTS if weights else DESCRIPTIONS
    # Subfolders hold other forms of the same weights (original/, onnx/).
    try:
        folder = snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=patterns,
                                   ignore_patterns=["*/*"])
    except GatedRepoError as error:
        raise SourceError(f"{model} is gated: accept its terms on the hub and log in (`hf auth login`, or HF_TOKEN)") \
            from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"{model} is neither a local path nor a model on the hub (or it is private: set HF_TOKEN)") \
            from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{model} has no revision {revision!r} on the hub: leave revision out, or name "
                          "another") from error
    except OfflineModeIsEnabled as error:
        raise SourceError(f"{model} is not in the local cache and HF_HUB_OFFLINE is set. Unset it. {LOCAL}") from error
    except LocalEntryNotFoundError as error:
        raise SourceError(f"{model} is not in the local cache (HF_HOME) and the hub cannot be reached: no network, "
                          f"or HF_HUB_OFFLINE is set. {LOCAL}") from error
    except HFValidationError as error:
        raise SourceError(f"{model!r} is neither a local path nor a hub id (owner/name): correct it") from error
    except HfHubHTTPError as error:
        raise SourceError(f"{model}: the hub answered with an error: {error}. {LOCAL}") from error
    except OSError as error:
        raise SourceError(f"{model} could not be fetched: {error}. Check the network and the free space of the "
                          f"cache folder (HF_HOME). {LOCAL}") from error
    return Path(folder)
