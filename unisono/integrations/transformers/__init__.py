"""Models, collators and TrainingArguments of Hugging Face's transformers.

    ARGUMENTS = TrainingArguments(output_dir="out", per_device_train_batch_size=8, max_steps=200)
    WEIGHTS = PretrainedWeights("folder", AutoModelForCausalLM)

    def main(run):
        model = WEIGHTS.place(run)                          # each process reads only its part
        train(run, ARGUMENTS, model, train_set, eval_dataset=valid_set, processing_class=tokenizer)

    unisono.main(main, settings_from(ARGUMENTS))

The loop is that of any script, so results do not depend on the number of processes. Fields of TrainingArguments that
have no counterpart are refused by name.
"""

from unisono.integrations.transformers.available import require_transformers
from unisono.integrations.transformers.collation import trainer_collator
from unisono.integrations.transformers.pretrained_weights import PretrainedWeights
from unisono.integrations.transformers.pretrained_writer import save_pretrained
from unisono.integrations.transformers.text_generation import generate_texts, generate_tokens
from unisono.integrations.transformers.trainer_loop import train
from unisono.integrations.transformers.training_arguments import settings_from

__all__ = [
    "PretrainedWeights",
    "generate_texts",
    "generate_tokens",
    "require_transformers",
    "save_pretrained",
    "settings_from",
    "train",
    "trainer_collator",
]
