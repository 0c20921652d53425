"""transformers' generate on a bounded cache: a streamed answer, then a turn with a late picture.

Run: python examples/transformers_generate.py [MODEL [PICTURE]]    (default: the bundled model)
"""

import sys
from typing import Any

from transformers import AutoModelForImageTextToText, TextStreamer

import mmkv
from mmkv.prompt.loading import load_processor
from mmkv.prompt.media import load_image
from mmkv.resources import asset

QUESTION, LATER = "what is at row 2, column 3?", "what is at row 1, column 1?"


def main() -> None:
    """Ask a model twice, with its own generate, without and with a bound."""
    name = sys.argv[1] if len(sys.argv) > 1 else mmkv.bundled_model()
    picture = load_image(sys.argv[2] if len(sys.argv) > 2 else asset("scene.png"))
    model = AutoModelForImageTextToText.from_pretrained(name, dtype="float32")
    # transformers' AutoProcessor makes the same tensors; for Qwen3-VL it needs torchvision.
    processor = load_processor(name)

    def inputs(conversation: list[dict[str, Any]]) -> dict[str, Any]:
        pictures = [picture for message in conversation if message["role"] == "user"]
        return processor.encode(processor.template.render(conversation, opening=True), pictures)

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}

    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    first = inputs([user(QUESTION)])
    width = first["input_ids"].shape[1]
    made = model.generate(**first, **options, return_dict_in_generate=True)
    reply = processor.tokenizer.decode(made.sequences[0, width:], skip_special_tokens=True)
    layers = [(layer.keys, layer.values) for layer in made.past_key_values.layers]
    held = sum(tensor.nbytes for pair in layers for tensor in pair)
    print(f"transformers alone: {reply} ({held / 1024:.0f} KiB of keys and values)")

    with mmkv.hf.retain(model, budget=8, prefill_chunk=12) as handle:
        print(f"policy {handle.engine.policy.name}, {handle.engine.budget.describe()}: ", end="")
        cache = mmkv.hf.RetainedCache()
        streamer = TextStreamer(processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
        made = model.generate(**first, **options, streamer=streamer, past_key_values=cache)
        print(f"  [{handle.memory().kv_bytes / 1024:.0f} KiB]")
        # The whole conversation again; what the cache has seen is not read twice.
        reply = processor.tokenizer.decode(made[0, width:], skip_special_tokens=True)
        answer = {"role": "assistant", "content": [{"type": "text", "text": reply}]}
        second = inputs([user(QUESTION), answer, user(LATER)])
        seen = cache.get_seq_length()
        model.generate(**second, **options, past_key_values=cache)
        tokens = cache.get_seq_length() - seen
        print(f"second picture: {tokens} more tokens, {handle.memory().kv_bytes / 1024:.0f} KiB")
    print(f"afterwards: {handle.memory().kv_bytes} bytes, generate is transformers' again")


if __name__ == "__main__":
    main()
