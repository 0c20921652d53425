"""Which of a checkpoint's chat templates counts, beside transformers of the installed version."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor, AutoTokenizer

from mmkv.engine.errors import ModelError
from mmkv.prompt.loading import load_processor
from tests.support.chat_models import save_llama, save_llava, save_qwen2_5_vl

SOURCES = ("processor_config", "chat_template.json", "chat_template.jinja", "tokenizer_config")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints without a template, by family."""
    made = {}
    for name, save in (("llava", save_llava), ("qwen", save_qwen2_5_vl), ("llama", save_llama)):
        made[name] = save(tmp_path_factory.mktemp(name))
        (made[name] / "chat_template.jinja").unlink()
        for weights in made[name].glob("*.safetensors"):
            weights.unlink()
    return made


def change(file: Path, **more: Any) -> None:
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(held | more))


def put(folder: Path, source: str, template: Any) -> None:
    if source == "chat_template.jinja":
        (folder / source).write_text(template)
    elif source == "chat_template.json":
        change(folder / source, chat_template=template)
    else:
        change(folder / f"{source}.json", chat_template=template)


@pytest.mark.parametrize("count", range(1, 5))
def test_the_template_is_that_of_transformers(
    bare: dict[str, Path], tmp_path: Path, count: int
) -> None:
    """Every set of sources; transformers' processor where the family has one that loads here."""
    for at, named in enumerate(itertools.combinations(SOURCES, count)):
        for family in ("llava", "qwen", "llama"):
            folder = tmp_path / f"{family}{at}"
            shutil.copytree(bare[family], folder)
            for source in named:
                put(folder, source, f"{{{{ '{source}' }}}}")
            tokenizer = AutoTokenizer.from_pretrained(folder)
            own = load_processor(folder).template.source
            if family == "llava":
                theirs = AutoProcessor.from_pretrained(folder, backend="pil").chat_template
                wanted = theirs or tokenizer.chat_template
            elif family == "qwen":  # its processor needs torchvision; the sources are read alike
                from transformers import ProcessorMixin

                found = ProcessorMixin.get_processor_dict(folder)[0].get("chat_template")
                wanted = found or tokenizer.chat_template
            else:
                older = "{{ 'chat_template.json' }}" if "chat_template.json" in named else None
                wanted = tokenizer.chat_template or older
            assert own == wanted, (family, named)


def test_a_vision_template_counts_more_than_the_tokenizers_text_template(
    bare: dict[str, Path], tmp_path: Path
) -> None:
    """As published Qwen2.5-VL conversions have it."""
    shutil.copytree(bare["qwen"], tmp_path / "m")
    text = "{% for m in messages %}{{ 'x' + m.content }}{% endfor %}"
    vision = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text or '<|image_pad|>' }}"
        "{% endfor %}{% endfor %}"
    )
    put(tmp_path / "m", "tokenizer_config", text)
    put(tmp_path / "m", "chat_template.json", vision)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    assert load_processor(tmp_path / "m").template.render(asked, opening=True) == (
        "<|image_pad|>what?"
    )


@pytest.mark.parametrize("family", ["llava", "llama"])
def test_of_several_templates_the_default_counts(
    bare: dict[str, Path], tmp_path: Path, family: str
) -> None:
    for at, sort in enumerate(("folder", "list")):
        folder = tmp_path / sort
        shutil.copytree(bare[family], folder)
        if sort == "folder":
            (folder / "additional_chat_templates").mkdir()
            (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'tools' }}")
            (folder / "chat_template.jinja").write_text("{{ 'plain' }}")
        else:
            named = [("tool_use", "{{ 'tools' }}"), ("default", "{{ 'plain' }}")]
            several = [{"name": name, "template": source} for name, source in named]
            put(folder, "tokenizer_config", several)
        wanted = AutoTokenizer.from_pretrained(folder).get_chat_template()
        assert load_processor(folder).template.source == wanted == "{{ 'plain' }}", at
    shutil.rmtree(tmp_path / "folder" / "additional_chat_templates")
    (tmp_path / "folder" / "chat_template.jinja").unlink()
    put(tmp_path / "folder", "tokenizer_config", [{"name": "rag", "template": "x"}])
    with pytest.raises(ModelError, match=r"several chat templates \(rag\)"):
        load_processor(tmp_path / "folder")
