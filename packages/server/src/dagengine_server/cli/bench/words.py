"""A tokenizer for models of random weights: every id is a word, a text of n words is n tokens, and no text is lost.

Words are told apart by blanks alone, so that sampled ids, read as text and encoded again, are the same ids. Common
English words come first, since those are what texts are made of (`texts`); every other id is letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from ..console import CommandError

COMMON = (
    "a about above after again age air all along also always animal another answer any ask at back base be became "
    "because bed been before began being best better between big bird black blue boat body book both box boy bring "
    "brought building built but call came can car care carry cat cause center change check child city class clear "
    "close cold color come common could country course cover cross cut dark day deep did different direct do does dog "
    "done door down draw dry during each early earth east easy eat end enough even ever every example eye face fact "
    "fall family far farm fast father feel feet few field figure find fine fire first fish five fly follow food foot "
    "for force form found four free friend from full game gave get girl give go gold good got government great green "
    "ground group grow had half hand happy hard has have he head hear heart heat heavy help her here high him his "
    "hold home horse hot hour house how hundred if in inch interest into is island it just keep kind king knew know "
    "land language large last late later laugh lead learn leave left less let letter life light like line list live "
    "long look love low made main make man many map mark may mean measure men might mile mind minute money moon more "
    "morning most mother mountain move much music must my name near need never new next night no north notice now "
    "number object of off often old on once one only open or order other our out over own page paper part pass past "
    "pattern people perhaps person picture piece place plain plan plane plant play point port pose power press "
    "problem product public pull question quick rain ran reach read ready real record red remember rest right river "
    "road rock room round rule run said same saw say school science sea second see seem self sentence serve set "
    "several shape she ship short should show side simple since sing sit six size sleep slow small snow so some song "
    "soon sound south space special spell stand star start state stay step stood stop story street strong study such "
    "summer sun sure surface system table take talk teach tell ten test than that the their them then there these "
    "they thing think this those thought thousand three through time to together told too took top toward town "
    "travel tree true try turn two under unit until up us use usual very voice vowel wait walk want war warm was "
    "watch water way we week well went were west what wheel when where which while white who whole why will wind "
    "with wonder wood word work world would write year yes you young your"
).split()
ROLES = ("<system>", "<user>", "<assistant>")
TEMPLATE = (
    "{{ bos_token + ' ' }}"
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """`tokenizer.json`, `tokenizer_config.json` and a chat template for a configuration, in its folder.

    A turn is its role's mark and its words; nothing ends it, so that an answer of a full length reads as one that is
    quoted. Raises CommandError for a vocabulary that is too small.
    """
    size = int(config["vocab_size"])
    fixed = {int(config["bos_token_id"]): "<bos>", int(config["eos_token_id"]): "<eos>"}
    if size < len(fixed) + len(ROLES) + 2:
        raise CommandError(f"a vocabulary of {size} ids is too small for texts", "shape")
    names = _names()
    vocab = {fixed.get(index) or next(names): index for index in range(size)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<eos>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    marks = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))


def _names() -> Iterator[str]:
    """Marks of roles, common words, and then letters, each once."""
    yield from ROLES
    yield from COMMON
    for number in count():
        name = ""
        number += len(ascii_uppercase)
        while number:
            number, letter = divmod(number, len(ascii_uppercase))
            name += ascii_uppercase[letter]
        yield name
