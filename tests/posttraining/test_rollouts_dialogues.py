"""Dialogues of several attempts: recorded tokens, feedback as the chat template writes it, and an end at success, at K or at the context's end."""

import math

import pytest
import torch

from cameraready.lm import _tasks
from cameraready.lm._tasks import Problem
from cameraready.models.tiny import TINY_KINDS
from cameraready.posttraining._logprobs import FEEDBACK, PADDING, PROMPT, completion_logprobs, loss_mask
from cameraready.posttraining._rollouts import pack, sample_attempts, sample_groups

pytestmark = pytest.mark.torch
NEVER = [Problem(text, "", lambda text: False, "own") for text in ("2+2=", "Hello there, how are you?")]
BYTES = [*range(0, 250, 9)]


@pytest.fixture(scope="module")
def tokenizer():
    from cameraready.models import tiny_tokenizer

    return tiny_tokenizer()


def model_of(kind="llama", *, ends=BYTES, **options):
    from cameraready.models import tiny_model

    model = tiny_model(kind, **options)
    model.generation_config.eos_token_id = list(ends)
    return model


def only(model, allowed):
    """The model, which can write these bytes alone."""

    class Few(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            kept = torch.zeros(262, dtype=torch.bool)
            kept[[*allowed]] = True
            output.logits.masked_fill_(~kept, -math.inf)
            return output

    model.__class__ = Few
    return model


def flat(dialogues):
    return [one for many in dialogues for one in many]


def attempts_of(dialogue):
    """The tokens of each attempt."""
    return [dialogue.ids[dialogue.attempt_ids == k].tolist() for k in range(int(dialogue.attempt_ids.max()) + 1)]


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_log_probabilities_are_those_of_a_training_pass(kind, tokenizer):
    model = model_of(kind)
    found = flat(sample_attempts(model, tokenizer, NEVER, n=3, attempts=3, max_new_tokens=9, temperature=0.9, seed=2))
    packed = pack(found, tokenizer.pad_token_id)
    scores = completion_logprobs(model, *packed[:3], temperature=0.9).logps
    written = loss_mask(packed.attempt_ids)
    torch.testing.assert_close(scores[written], packed.logps[written], rtol=1e-5, atol=1e-5)
    assert (packed.logps[~written] == 0).all()
    assert {PADDING, FEEDBACK, 0, 1, 2} == set(packed.attempt_ids.unique().tolist())
    for row, dialogue in enumerate(found):
        assert packed.input_ids[row][packed.attention_mask[row] == 1].tolist() == dialogue.ids.tolist()


def test_every_token_is_accounted_for(tokenizer):
    model = model_of()
    for dialogue in flat(sample_attempts(model, tokenizer, NEVER, n=4, attempts=3, max_new_tokens=6, feedback="No.")):
        said = [*b"\nNo.\n"]
        wanted = tokenizer(dialogue.problem.prompt).input_ids
        kinds = [PROMPT] * len(wanted)
        for k, ids in enumerate(attempts_of(dialogue)):
            wanted, kinds = wanted + ids, kinds + [k] * len(ids)
            if k < 2:
                wanted, kinds = wanted + said, kinds + [FEEDBACK] * len(said)
        assert dialogue.ids.tolist() == wanted
        assert dialogue.attempt_ids.tolist() == kinds
        assert dialogue.rewards.tolist() == [0, 0, 0]
        assert dialogue.texts == [tokenizer.decode(ids, skip_special_tokens=True) for ids in attempts_of(dialogue)]
        assert not dialogue.cut
        assert not dialogue.solved


def test_an_attempt_that_writes_the_feedback_itself_is_still_the_models(tokenizer):
    # The model may only write what the feedback says: a search for the words would find them everywhere.
    model = only(model_of(ends=[]), b"\nNo.")
    for dialogue in flat(sample_attempts(model, tokenizer, NEVER, n=4, attempts=2, max_new_tokens=12, feedback="No.")):
        counts = [int((dialogue.attempt_ids == k).sum()) for k in (0, FEEDBACK, 1)]
        assert counts == [12, 5, 12]


def test_the_first_attempts_are_the_groups_of_the_same_seed(tokenizer):
    model = model_of()
    groups = sample_groups(model, tokenizer, NEVER, n=3, max_new_tokens=9, seed=7)
    dialogues = sample_attempts(model, tokenizer, NEVER, n=3, attempts=2, max_new_tokens=9, seed=7)
    for group, many in zip(groups, dialogues, strict=True):
        assert group.completions == [dialogue.texts[0] for dialogue in many]
    more = sample_attempts(model, tokenizer, NEVER, n=2, attempts=3, max_new_tokens=9, seed=7, batch=1)
    for few, many in zip(dialogues, more, strict=True):
        assert [one.texts for one in few[:2]] == [one.texts[:2] for one in many]


def test_a_dialogue_stops_at_its_first_success(tokenizer):
    model, calls = model_of(), []

    def check(text):
        calls.append(text)
        return len(calls) % 3 == 0

    problem = Problem("Guess.", "", check, "own")
    dialogues = flat(sample_attempts(model, tokenizer, [problem], n=8, attempts=4, max_new_tokens=5, seed=1))
    for dialogue in dialogues:
        rewards = dialogue.rewards.tolist()
        made = len(dialogue.texts)
        assert rewards[: made - 1] == [0.0] * (made - 1)
        assert all(math.isnan(reward) for reward in rewards[made:])
        assert dialogue.reached.tolist() == [k < made for k in range(4)]
        assert dialogue.solved == (rewards[made - 1] == 1)
        assert dialogue.solved or made == 4
        assert int(dialogue.attempt_ids[-1]) == made - 1  # no feedback behind the last attempt
    assert sum(len(dialogue.texts) for dialogue in dialogues) == len(calls)
    assert {len(dialogue.texts) for dialogue in dialogues} > {1}


def test_feedback_may_tell_what_was_wrong(tokenizer):
    given = []

    def feedback(problem, text, attempt):
        given.append((problem, text, attempt))
        return f"No {attempt}: {len(text)}."

    (found,) = flat(
        sample_attempts(model_of(), tokenizer, NEVER[:1], n=1, attempts=3, max_new_tokens=5, feedback=feedback)
    )
    assert given == [(NEVER[0], found.texts[0], 0), (NEVER[0], found.texts[1], 1)]
    said = tokenizer.decode(found.ids[found.attempt_ids == FEEDBACK])
    assert said == "".join(f"\nNo {k}: {len(found.texts[k])}.\n" for k in (0, 1))
    with pytest.raises(TypeError, match="feedback must be a text"):
        sample_attempts(model_of(), tokenizer, NEVER[:1], n=1, attempts=2, max_new_tokens=5, feedback=lambda *_: None)


def chat(tokenizer, text):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )


def test_in_a_chat_feedback_is_a_turn_of_the_user(tokenizer):
    problem = Problem(chat(tokenizer, "What is 2+2?"), "", lambda text: False, "own")
    for dialogue in flat(
        sample_attempts(model_of(ends=[]), tokenizer, [problem], n=3, attempts=3, max_new_tokens=6, feedback="No.")
    ):
        said = tokenizer("\n<|user|>No.\n<|assistant|>", add_special_tokens=False).input_ids
        assert dialogue.ids[dialogue.attempt_ids == FEEDBACK].tolist() == 2 * said
        assert dialogue.ids[dialogue.attempt_ids == PROMPT].tolist() == tokenizer(problem.prompt).input_ids


#: Turns end with the end token, as in most chat models.
ENDED = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_a_dialogue_reads_as_the_template_writes_it_and_an_end_token_stands_once():
    from cameraready.models import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = ENDED
    model = model_of(ends=[])
    with torch.no_grad():  # an end token is likely
        model.lm_head.weight[258] = 0.7 * model.lm_head.weight[100] + 0.7 * model.lm_head.weight[101]
    problem = Problem(chat(tokenizer, "What is 2+2?"), "", lambda text: False, "own")
    dialogues = flat(sample_attempts(model, tokenizer, [problem], n=30, attempts=2, max_new_tokens=8, feedback="No."))
    ended = [attempts_of(dialogue)[0][-1] == 258 for dialogue in dialogues]
    assert 0 < sum(ended) < 30
    for dialogue, by_itself in zip(dialogues, ended, strict=True):
        assert dialogue.ids[:2].tolist() == [
            257,
            260,
        ]  # one begin token, though the template writes it and the tokenizer adds it
        first, second = attempts_of(dialogue)
        said = dialogue.ids[dialogue.attempt_ids == FEEDBACK].tolist()
        behind = tokenizer("\n<|user|>No.<|eos|>\n<|assistant|>", add_special_tokens=False).input_ids
        assert said == (behind if by_itself else [258, *behind])
        body = bytes(i for i in first if i < 256).decode("utf-8", "ignore")
        if by_itself and [*body.encode()] == first[:-1]:  # what it wrote is text that the template can be given
            turns = [("user", "What is 2+2?"), ("assistant", body), ("user", "No.")]
            text = tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in turns],
                tokenize=False,
                add_generation_prompt=True,
            )
            whole = tokenizer(text, add_special_tokens=False).input_ids
            assert dialogue.ids.tolist() == [*whole, *second]


def test_a_plain_prompt_to_a_tokenizer_with_a_template_stays_plain(tokenizer):
    (dialogue,) = flat(
        sample_attempts(model_of(), tokenizer, NEVER[:1], n=1, attempts=2, max_new_tokens=4, feedback="No.")
    )
    assert dialogue.ids[dialogue.attempt_ids == FEEDBACK].tolist() == [*b"\nNo.\n"]


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('one turn only') }}", "failed on a plain dialogue.*one turn only"),
        ("{{ messages[0]['content'] }}>", "leaves out what the model said"),
    ],
)
def test_a_template_that_cannot_hold_a_dialogue_is_refused(template, match):
    from cameraready.models import ModelError, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    problem = Problem("What?>", "", lambda text: False, "own")
    with pytest.raises(ModelError, match=match):
        sample_attempts(model_of(), tokenizer, [problem], n=1, attempts=2, max_new_tokens=4)


@pytest.mark.parametrize("context", range(30, 75, 4))
def test_the_end_of_the_context_cuts_a_dialogue(context, tokenizer):
    model = only(model_of(ends=[], max_positions=context), range(256))  # it never ends by itself
    problem = Problem("a" * 19, "", lambda text: False, "own")
    (dialogue,) = flat(
        sample_attempts(model, tokenizer, [problem], n=1, attempts=3, max_new_tokens=10, feedback="NoNoNo")
    )
    # 20 tokens of prompt, 10 of an attempt, 8 of feedback: the attempts begin at 20, 38 and 56.
    starts = [start for start in (20, 38, 56) if start < context]
    lengths = [min(10, context - start) for start in starts]
    assert [len(ids) for ids in attempts_of(dialogue)] == lengths
    assert dialogue.cut == (context < 66)
    assert dialogue.reached.tolist() == [k < len(starts) for k in range(3)]
    assert len(dialogue.ids) <= context
    assert int(dialogue.attempt_ids[-1]) == len(starts) - 1


def test_a_text_of_merged_tokens_is_never_tokenized_again():
    # Pieces that would merge with their neighbours if the text were read anew.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate("ab!")}
    core = Tokenizer(models.BPE(vocab={**letters, "ab": 3, "abab": 4}, merges=[("a", "b"), ("ab", "ab")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="!")
    model = model_of(ends=[], vocab=5)
    problem = Problem("abab", "", lambda text: False, "own")
    dialogues = flat(
        sample_attempts(model, tokenizer, [problem], n=20, attempts=2, max_new_tokens=6, feedback=lambda *_: "")
    )
    different = 0
    for dialogue in dialogues:
        assert len(dialogue.ids) == sum(map(len, attempts_of(dialogue))) + 1
        text = tokenizer.decode(dialogue.ids.tolist())
        different += tokenizer(text).input_ids != dialogue.ids.tolist()
        packed = pack([dialogue])
        found = completion_logprobs(model, *packed[:3]).logps[0]
        torch.testing.assert_close(found, dialogue.logps[1:], rtol=1e-5, atol=1e-5)
    assert different > 5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"attempts": 0}, "attempts must be at least 1"),
        ({"n": 0}, "n must be at least 1"),
        ({"problems": [Problem("a" * 1020, "", bool, "own")]}, "problem 0 has 1021 tokens"),
        ({"problems": [Problem("a", "", lambda text: math.nan, "own")]}, "the verifier of the problem 'a' gave nan"),
    ],
)
def test_impossible_arguments_are_refused(change, match, tokenizer):
    given = {"problems": NEVER, "n": 1, "attempts": 2, "max_new_tokens": 8} | change
    with pytest.raises(ValueError, match=match):
        sample_attempts(model_of(), tokenizer, given.pop("problems"), **given)


def test_one_attempt_is_a_group(tokenizer):
    model = model_of()
    problems = _tasks.own([("2+2=", "4")])
    (many,) = sample_attempts(model, tokenizer, problems, n=4, attempts=1, max_new_tokens=7)
    (group,) = sample_groups(model, tokenizer, problems, n=4, max_new_tokens=7)
    for dialogue, ids, right in zip(many, group.token_ids, group.correct, strict=True):
        assert attempts_of(dialogue) == [ids.tolist()]
        assert dialogue.solved == bool(right)
    for one, other in zip(pack(many), pack([group]), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
