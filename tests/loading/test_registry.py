import pytest

from jpaged.errors import UnsupportedModelError
from jpaged.models import registry


def test_every_entry_can_be_imported() -> None:
    for architecture in registry.ARCHITECTURES:
        assert isinstance(registry.model_class(architecture), type)


def test_a_miss_lists_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'GPT9' is not supported; .*LlamaForCausalLM"):
        registry.model_class("GPT9")


def test_an_error_in_a_model_file_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ARCHITECTURES, "Broken", "jpaged.models.no_such_module:Model")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.model_class("Broken")
