"""Tokenizers of one token for each character, for models that are made up."""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNK, BOS, EOS = "<unk>", "<s>", "</s>"
PRINTABLE = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""What English text and programs are made of: 96 characters."""
_FILLER = 0x4E00
"""The first of 20,992 Chinese characters: a token for each id that is left."""
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def make_tokenizer(
    vocab_size: int, characters: Sequence[str] = PRINTABLE
) -> PreTrainedTokenizerFast:
    """A tokenizer of these characters, after three special tokens; text and ids go both ways.

    Raises ValueError for a vocabulary too small for the characters.
    """
    names = [UNK, BOS, EOS, *characters]
    if vocab_size < len(names):
        raise ValueError(f"the tokenizer needs {len(names)} ids, not {vocab_size}")
    names += [chr(_FILLER + i) for i in range(vocab_size - len(names))]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast
