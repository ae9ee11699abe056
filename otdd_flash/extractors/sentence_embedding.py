"""The text extractors: `text` by sentence-transformers, `wordllama` by means of word vectors.

Both return a `Network` (`extractors.network`). Both need the extra `text`, so its packages are
imported in the functions that use them. `otdd_flash.extractors` exports both and builds them by
name. Nothing may be fetched without `download`. The `description` of a network is part of the keys
of cached features: after a change of it, they are not found any more.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otdd_flash.arguments import takes
from otdd_flash.checks import shown
from otdd_flash.errors import InputError
from otdd_flash.extractors.network import Network
from otdd_flash.offline import ALLOW, network


# `takes` checks arguments by their annotations.
@takes(prefix="extractor.")
def text(model: str, download: bool = False) -> Network:
    """Make a sentence-transformers model an extractor of one vector per text (b, d).

    Args:
        model: a folder, or a name on the Hugging Face hub.
        download: whether a missing model may be fetched.

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
    """Return a text that tokenizers can encode.

    Raises:
        InputError: it holds a lone surrogate and cannot be encoded.
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


WEIGHTS = Path("weights", "l2_supercat_256.safetensors")

TOKENIZER = Path("tokenizers", "l2_supercat_tokenizer_config.json")

TABLE = "embedding.weight"


class WordVectors(nn.Module):
    """The mean of the vectors of a text's tokens; zeros for a text without any.

    Args:
        table: (tokens, d), a vector per token.
        tokenizer: a `tokenizers.Tokenizer`, whose token ids are rows of the table.
    """

    def __init__(self, table: Tensor, tokenizer: Any) -> None:
        super().__init__()
        self.vectors = nn.EmbeddingBag.from_pretrained(table.float(), mode="mean")
        self.tokenizer = tokenizer

    def forward(self, texts: list[str]) -> Tensor:
        """Embed b texts, (b, d)."""
        tokens = [one.ids for one in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
        starts = torch.tensor([0, *map(len, tokens[:-1])]).cumsum(0)
        device = self.vectors.weight.device
        # The type is long also if no text has a token.
        numbers = torch.tensor([number for one in tokens for number in one], dtype=torch.long)
        vectors: Tensor = self.vectors(numbers.to(device), starts.to(device))
        return vectors


def wordllama() -> Network:
    """Make WordLlama's word vectors an extractor of one vector per text (b, 256).

    A text is the mean of its tokens' vectors, whatever their order; it is not normalised. A CPU
    embeds thousands of texts a second.

    The package `wordllama` (19 MB, MIT, extra `text`) holds a table of 256 numbers per token,
    distilled from large language models, and a tokenizer. Both files are read from its folder and
    nothing is fetched. Its code is not run: it configures logging for the whole process, and
    version 0.4 looks for its tokenizer in the wrong folder and then asks a hub.

    Raises:
        InputError: wordllama is not installed, or its version holds other files.
    """
    spec = find_spec("wordllama")
    if spec is None or spec.submodule_search_locations is None:
        raise InputError("the wordllama extractor needs wordllama: pip install 'otdd-flash[text]'")
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    folder, release = Path(next(iter(spec.submodule_search_locations))), version("wordllama")
    for file in (WEIGHTS, TOKENIZER):
        if not (folder / file).is_file():
            raise InputError(
                f"wordllama {release} in {folder} holds no {file}; install it again, or another "
                "version: pip install 'wordllama>=0.3'"
            )
    table = load_file(folder / WEIGHTS)[TABLE]
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    # The mean is over all tokens of a text, without padding.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return Network(
        description=f"wordllama {release} {WEIGHTS.stem}",
        module=WordVectors(table, tokenizer).eval(),
        modalities=frozenset({"text"}),
        prepare=whole_text,
        forward=_embed,
    )


def _embed(module: nn.Module, texts: list[str]) -> Tensor:
    vectors: Tensor = module(texts)
    return vectors
