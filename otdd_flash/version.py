"""The version of the package, in a module without imports so that any module can read it.

`files.tensor_file`, `flows.checkpoint` and `result` write it into files,
`extractors.content_digest` into keys of cached features, `files.cache` and `labels.pair_cache` into
messages, and `distributed.ranks` compares it between ranks.
"""

__version__ = "0.2.0"
