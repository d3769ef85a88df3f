"""What tests of the room share: tiny models, tokenizers, packaged real models, and what a clean model looks like."""

import functools

import pytest

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """Models as small as those of the tests lose more to a second thread than they gain."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny():
    """``tiny(kind)``: a random model of two layers, the same for all tests, which leave it as it was."""
    from cameraready.models import tiny_model

    return functools.cache(lambda kind="llama": tiny_model(kind).eval())


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte, a beginning-of-text token in front, a chat template."""
    from cameraready.models import tiny_tokenizer

    return tiny_tokenizer(max_positions=100_000)


@pytest.fixture(scope="session")
def bpe_tokenizer():
    """Trained here, so that tokens are pieces of words that may merge or part where texts are joined. No special tokens."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="session")
def real_model():
    """``real_model(name)``: a packaged model in float32; the test is skipped where its bytes are not on this machine."""

    def opened_or_skipped(name):
        from cameraready.models import ModelError, opened

        try:
            return opened(name)
        except ModelError as error:
            if "not on this machine" in str(error):
                pytest.skip(str(error))
            raise

    return opened_or_skipped


def hooks_of(model):
    """All hooks of all modules, by the module's name and the kind of hook."""
    return {
        f"{name}.{kind}": tuple(getattr(module, kind))
        for name, module in model.named_modules()
        for kind in HOOKS
        if getattr(module, kind, None)
    }


def assert_clean(model):
    """Nothing is hooked to the model, no module has a method of its own, and all are in evaluation mode."""
    assert hooks_of(model) == {}
    replaced = {"forward", "generate", "__call__"}
    assert {name for name, module in model.named_modules() if vars(module).keys() & replaced} == set()
    assert {name for name, module in model.named_modules() if module.training} == set()
