"""Rollouts of real models: the sampler and a training pass agree over their whole vocabulary, and dialogues read as their templates write them."""

import pytest
import torch

from cameraready.lm import _tasks
from cameraready.lm._tasks import Problem
from cameraready.posttraining._logprobs import FEEDBACK, PROMPT, completion_logprobs, loss_mask, positions_of
from cameraready.posttraining._rollouts import pack, sample_attempts, sample_groups

pytestmark = [pytest.mark.models, pytest.mark.torch]


def real(name):
    """A packaged model in float32; the test is skipped where its bytes are not on this machine."""
    from cameraready.models import ModelError, opened

    try:
        return opened(name)
    except ModelError as error:
        if "not on this machine" in str(error):
            pytest.skip(str(error))
        raise


def test_gemma_samples_what_it_scores():
    from cameraready.models.hooks import hooks_of

    lm = real("gemma-3-270m")
    problems = _tasks.own(
        [("The capital of France is", "Paris"), ("1, 2, 3, 4, 5, 6, 7,", "8"), ("Once upon a time", "there")]
    )
    groups = sample_groups(lm.model, lm.tokenizer, problems, n=4, max_new_tokens=12, temperature=0.7, seed=1)
    packed = pack(groups, lm.pad_id)
    with torch.no_grad():
        found = completion_logprobs(lm.model, *packed[:3], temperature=0.7, entropy=True)
        logits = lm.model(
            packed.input_ids, attention_mask=packed.attention_mask, position_ids=positions_of(packed.attention_mask)
        ).logits
    torch.testing.assert_close(found.logps, packed.logps, rtol=1e-4, atol=1e-4)
    logps = (logits[:, -packed.completion_length - 1 : -1].double() / 0.7).log_softmax(-1)
    written = loss_mask(packed.attempt_ids)
    chosen = logps.gather(-1, packed.input_ids[:, -packed.completion_length :, None])[..., 0]
    torch.testing.assert_close(found.logps[written].double(), chosen[written], rtol=1e-5, atol=2e-5)
    entropies = -(logps.exp() * logps).sum(-1)
    torch.testing.assert_close(found.entropies[written].double(), entropies[written], rtol=1e-4, atol=1e-4)
    assert groups[0].correct.any()  # it knows that much, so its text was read with the right positions
    assert any("8, 9" in text for text in groups[1].completions)
    assert hooks_of(lm.model) == 0
    small = sample_groups(
        lm.model, lm.tokenizer, problems[:1], n=4, max_new_tokens=12, temperature=0.7, seed=1, batch=2
    )
    assert small[0].completions == groups[0].completions


def test_a_chat_of_qwen_reads_as_its_template_writes_it():
    lm = real("qwen2.5-coder-0.5b-instruct")
    question, told = "What is 17 + 25? Answer with the number alone.", "Wrong. Answer again."
    problem = Problem(lm.prompt(question), "", lambda text: False, "own")
    (dialogues,) = sample_attempts(
        lm.model, lm.tokenizer, [problem], n=3, attempts=2, max_new_tokens=12, feedback=told, temperature=0.6, seed=3
    )
    ended = 0
    for dialogue in dialogues:
        first = dialogue.ids[dialogue.attempt_ids == 0]
        said = lm.tokenizer.decode(dialogue.ids[dialogue.attempt_ids == FEEDBACK])
        behind = f"\n<|im_start|>user\n{told}<|im_end|>\n<|im_start|>assistant\n"
        assert lm.tokenizer.decode(dialogue.ids[dialogue.attempt_ids == PROMPT]) == problem.prompt
        if lm.tokenizer.decode(first[-1:]) != "<|im_end|>":
            assert said == "<|im_end|>" + behind
            continue
        ended += 1
        assert said == behind
        turns = [("user", question), ("assistant", dialogue.texts[0]), ("user", told)]
        text = lm.tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in turns], tokenize=False, add_generation_prompt=True
        )
        assert lm.tokenizer.decode(dialogue.ids).startswith(text)
    assert ended
    assert any("42" in dialogue.texts[0] for dialogue in dialogues)
    packed = pack(dialogues, lm.pad_id)
    with torch.no_grad():
        found = completion_logprobs(lm.model, *packed[:3], temperature=0.6).logps
    written = loss_mask(packed.attempt_ids)
    torch.testing.assert_close(found[written], packed.logps[written], rtol=1e-4, atol=1e-4)
