"""The text extractor: sentence embeddings by sentence-transformers (extra `text`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from otdd_flash.arguments.datasets import EXTRACTORS
from otdd_flash.checks import shown, takes
from otdd_flash.errors import InputError
from otdd_flash.extractors.network import Network
from otdd_flash.offline import ALLOW, network


@takes(EXTRACTORS["text"], prefix="extractor.")
def text(model: str, download: bool = False) -> Network:
    """Make a sentence-transformers model an extractor of one vector per text (b, d).

    Args:
        model: a folder, or a name on the Hugging Face hub.
        download: whether a model that is not on this machine may be fetched.

    Raises:
        InputError: sentence-transformers is not installed, or there is no such model.
    """
    try:
        import sentence_transformers
    except ImportError:
        raise InputError(
            "the text extractor needs sentence-transformers: pip install 'otdd-flash[text]'"
        ) from None
    try:
        with network(allowed=download):
            module = sentence_transformers.SentenceTransformer(
                model, device="cpu", local_files_only=not download
            )
    except (OSError, ValueError) as error:
        fetching = "when it can be reached" if download else f"where {ALLOW}"
        raise InputError(
            f"cannot load the text model {model!r} ({error}); give extractor.model= a folder, or a "
            f"name on the hub {fetching}"
        ) from error
    limit = getattr(module, "max_seq_length", None)
    return Network(
        description=f"text {sentence_transformers.__version__} {model} tokens={limit}",
        module=module.eval(),
        modalities=frozenset({"text"}),
        prepare=whole_text,
        forward=encode,
    )


def whole_text(item: Any) -> str:
    """Return a text that tokenizers take.

    Raises:
        InputError: it cannot be encoded, as half of a surrogate pair stands alone in it.
    """
    given = str(item)
    try:
        given.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{shown(given)} holds half of a character (a lone surrogate); read its file in the "
            "encoding that it was written in, or leave the row out"
        ) from None
    return given


def encode(module: nn.Module, texts: list[str]) -> Tensor:
    """Embed texts on the module's device."""
    encoder: Any = module
    features = encoder.encode(
        texts, batch_size=len(texts), convert_to_tensor=True, show_progress_bar=False
    )
    assert isinstance(features, Tensor)
    return features
