"""A model family of your own: a checkpoint whose model type mmkv does not know.

Run: python examples/custom_family.py    (it writes a small random checkpoint and reads it back)
"""

import tempfile

import torch
import transformers

import mmkv
from mmkv.engine.model.families import TextFamily


class NanoConfig(transformers.LlamaConfig):
    """What your own transformers config may be."""

    model_type = "nano"


class NanoForCausalLM(transformers.LlamaForCausalLM):
    """What your own transformers model may be: decoder layers in ``model``, a head beside it."""

    config_class = NanoConfig


# transformers has to read the checkpoint first.
transformers.AutoConfig.register("nano", NanoConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(NanoConfig, NanoForCausalLM, exist_ok=True)


class NanoFamily(TextFamily):
    """Reads text; the decoder is found where Llama has it, in ``model``."""

    model_types = ("nano",)


mmkv.register_family(NanoFamily)


def main() -> None:
    """Decode with transformers and with mmkv, and compare the tokens."""
    torch.manual_seed(0)
    config = NanoConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        initializer_range=0.3,
    )
    prompt = torch.randint(3, 96, (1, 24))
    with tempfile.TemporaryDirectory() as folder:
        model = NanoForCausalLM(config).eval()
        model.save_pretrained(folder)
        wanted = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, 24:].tolist()
        for budget in (64, 8):
            engine = mmkv.Engine.from_pretrained(folder, policy="streamingllm", budget=budget)
            with engine.session() as session:
                token = int(session.prefill({"input_ids": prompt}).argmax())
                tokens = [token, *engine.decode_many([session], [token], 15)[0]]
                kept = session.memory().entries
            same = sum(a == b for a, b in zip(tokens, wanted, strict=True))
            print(f"budget {budget}: {kept} entries kept, {same} of 16 tokens as in transformers")


if __name__ == "__main__":
    main()
