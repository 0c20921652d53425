"""A family with a kind of layer of its own: it keeps a state of each sequence, and no entries.

Run: python examples/custom_layer.py    (it writes a small random checkpoint and reads it back)
"""

import tempfile

import torch
import transformers
from torch import Tensor, nn

import mmkv
from mmkv.engine.model.families import TextFamily
from mmkv.engine.model.state_layer import State, StateLayer, StateShapes

KIND, SIZE = "linear_attention", 8  # as layer_types names the kind


class Fading(nn.Module):
    """A made-up linear attention in transformers: a token sees v_i by (q . k_i) fade^(t - i)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(hidden, SIZE), nn.Linear(hidden, SIZE)
        self.value, self.fade = nn.Linear(hidden, hidden), nn.Parameter(torch.tensor(1.0))

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        """Compute it for whole sequences ``[B, T, d]``, without a cache."""
        age = torch.arange(hidden_states.shape[1]).float()
        age = (age[:, None] - age).masked_fill(age[:, None] < age, torch.inf)
        seen = self.query(hidden_states) @ self.key(hidden_states).mT
        return (seen * self.fade.sigmoid() ** age) @ self.value(hidden_states), None


class FadingLayer(StateLayer):
    """The same in mmkv: S <- fade S + k v^T; o = q S."""

    def __init__(self, module: Fading) -> None:
        self.module = module

    def states(self, dtype: torch.dtype) -> StateShapes:
        return {"sum": ((SIZE, self.module.value.out_features), torch.float32)}

    def chunk(self, inputs: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        ours, total, out = self.module, state["sum"], []
        for x in inputs[0]:
            total = ours.fade.sigmoid() * total + torch.outer(ours.key(x), ours.value(x))
            out.append(ours.query(x) @ total)
        return torch.stack(out), {"sum": total}


class FadingConfig(transformers.LlamaConfig):
    """Its ``layer_types`` say which layers are of this kind."""

    model_type = "fading"


class FadingForCausalLM(transformers.LlamaForCausalLM):
    """What your own transformers model may be."""

    config_class = FadingConfig

    def __init__(self, config: FadingConfig) -> None:
        super().__init__(config)
        for layer, kind in zip(self.model.layers, config.layer_types, strict=True):
            if kind == KIND:
                layer.self_attn = Fading(config.hidden_size)


transformers.AutoConfig.register("fading", FadingConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(FadingConfig, FadingForCausalLM, exist_ok=True)


class FadingFamily(TextFamily):
    """Says which layers have no entries, and makes them."""

    model_types = ("fading",)
    state_kinds = (KIND,)

    @staticmethod
    def state_layer(layer: nn.Module) -> StateLayer:
        return FadingLayer(layer.self_attn)


mmkv.register_family(FadingFamily)


def main() -> None:
    """Decode with transformers and with mmkv, and compare the tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    config = FadingConfig(**sizes, layer_types=[KIND, "full_attention", KIND], eos_token_id=None)
    prompt = torch.randint(3, 96, (1, 24))
    with tempfile.TemporaryDirectory() as folder:
        model = FadingForCausalLM(config).eval()
        model.save_pretrained(folder)
        wanted = model.generate(prompt, max_new_tokens=16, do_sample=False, use_cache=False)
        for budget in (64, 8):
            engine = mmkv.Engine.from_pretrained(folder, policy="streamingllm", budget=budget)
            with engine.session() as session:
                token = int(session.prefill({"input_ids": prompt}).argmax())
                tokens = [token, *engine.decode_many([session], [token], 15)[0]]
                held = session.memory()
            same = sum(a == b for a, b in zip(tokens, wanted[0, 24:].tolist(), strict=True))
            kept = f"{held.entries} entries and {held.state_bytes} bytes of state kept"
            print(f"budget {budget}: {kept}, {same} of 16 tokens as in transformers")


if __name__ == "__main__":
    main()
