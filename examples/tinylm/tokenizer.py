"""Train the byte-level BPE tokenizer on the corpus: python -m examples.tinylm.tokenizer"""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import MODELS, TRAIN_SEED, take

VOCABULARY = 2048
END = "<|endoftext|>"  # id 0; stands before every story and after the last


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([take(TRAIN_SEED, 4_000_000)], trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    tokenizer.save(str(MODELS / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (MODELS / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (MODELS / "special_tokens_map.json").write_text(json.dumps({"bos_token": END, "eos_token": END}, indent=2) + "\n")


if __name__ == "__main__":
    main()
