"""Small tokenizers made on the spot, whose tokens cut characters into pieces."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

PIECES = (
    b"\xf0\x9f",
    b"\x98\x80",
    b"\x80a",
    b"\xc3",
    b"\xa9t",
    b" the",
    b"he",
    b"\xe2\x82",
    b"\xacSTOP",
    b"ST",
    b"OP",
    b"\xf0\x9f\x98\x80\xf0",
    b"\x9f\x98",
    b"\n\n",
    b"END",
    b"\xff\xfe",
)
SPECIALS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")


def byte_chars() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (Radford et al., GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def byte_level(bos: bool = False) -> Tokenizer:
    """Ids 0 to 255 are bytes, then PIECES, then SPECIALS. With `bos` a post-processor puts <bos> in front."""
    chars = byte_chars()
    names = [*(bytes([b]) for b in range(256)), *PIECES]
    names = list(dict.fromkeys(names))
    vocab = {"".join(chars[b] for b in name): i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
        )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like SentencePiece with byte fallback: ids 0 to 255 are bytes, then words with a space mark."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    for word in ("▁", "▁the", "▁a", "cat", "▁cat", "s", "<unk>"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, template: str | None = None, **config: object) -> Path:
    """Write the files that a Hugging Face folder would have."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
