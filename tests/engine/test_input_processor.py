"""What the input processor makes of prompts and parameters, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from enginebay.engine.input_processor import InputProcessor
from enginebay.errors import RequestError, RequestTooLargeError
from enginebay.sampling.params import SamplingParams
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Bytes, and a beginning-of-sequence token that is put before text; id 256 is <s>, 257 </s>."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


@pytest.fixture
def inputs(tokenizer: Any) -> InputProcessor:
    return InputProcessor(tokenizer, vocab_size=300, max_model_len=32, eos_token_ids=(257,))


@pytest.fixture
def without_tokenizer() -> InputProcessor:
    return InputProcessor(None, vocab_size=300, max_model_len=32, eos_token_ids=(257,))


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_text_gets_the_tokenizers_special_tokens(inputs: InputProcessor, tokenizer: Any) -> None:
    expected = [256, *ids(tokenizer, "hello")]
    for prompt in ("hello", {"prompt": "hello"}):
        request, processed = inputs.process(prompt, SamplingParams())  # type: ignore[arg-type]
        assert request.prompt_token_ids.tolist() == expected
        assert request.prompt_token_ids.dtype == np.int32
        assert processed.text == "hello"


@pytest.mark.parametrize("given", [[5, 6], (5, 6), np.array([5, 6]), [np.int64(5), 6]])
def test_ids_are_taken_as_they_are(inputs: InputProcessor, given: Any) -> None:
    request, processed = inputs.process({"prompt_token_ids": given}, SamplingParams())
    assert request.prompt_token_ids.tolist() == [5, 6]
    assert processed.text is None


def test_ids_may_carry_their_text(inputs: InputProcessor) -> None:
    assert inputs.parse({"prompt_token_ids": [5], "prompt": "x"}).text == "x"


def test_what_a_request_holds(inputs: InputProcessor) -> None:
    params = SamplingParams(max_tokens=7, seed=0, stop_token_ids=(9,))
    request, _ = inputs.process({"prompt_token_ids": [5]}, params)
    assert (request.seed, request.max_output_tokens, request.stop_token_ids) == (0, 7, frozenset({9, 257}))
    again, _ = inputs.process({"prompt_token_ids": [5]}, params)
    assert again.request_id != request.request_id


def test_ignore_eos_keeps_the_users_stop_ids(inputs: InputProcessor) -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(9,))
    assert inputs.process({"prompt_token_ids": [5]}, params)[0].stop_token_ids == frozenset({9})


def test_absent_seeds_differ() -> None:
    """C34: requests without a seed do not answer alike."""
    inputs = InputProcessor(None, vocab_size=300, max_model_len=32)
    params = SamplingParams(detokenize=False)
    seeds = {inputs.process({"prompt_token_ids": [5]}, params)[0].seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (None, "not NoneType"),
        (7, "not int"),
        (b"bytes", "not bytes"),
        ([1, 2], r"prompt_token_ids.*not list"),
        ({}, "keys are missing"),
        ({"prompt_embeds": 1}, "'prompt_embeds'"),
        ({"prompt": "a", "multi_modal_data": {}}, "'multi_modal_data'"),
        ({"prompt": 3}, "'prompt' must be a string, not int"),
        ({"prompt": None}, "not NoneType"),
        ({"prompt_token_ids": [1], "prompt": 3}, "not int"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": "12"}, "list of integers, not str"),
        ({"prompt_token_ids": None}, "not NoneType"),
        ({"prompt_token_ids": np.array([[1]])}, "not ndarray"),
        ({"prompt_token_ids": [1, -1]}, r"\[1\] is -1; the vocabulary is 0 to 299"),
        ({"prompt_token_ids": [300]}, r"\[0\] is 300"),
        ({"prompt_token_ids": [2**70]}, "vocabulary"),
        ({"prompt_token_ids": [1, True]}, r"\[1\] must be an integer, not True"),
        ({"prompt_token_ids": [1.0]}, r"\[0\] must be an integer, not 1.0"),
        ({"prompt_token_ids": [None]}, "must be an integer"),
        ("a\ud800", "not valid Unicode at character 1"),
    ],
)
def test_a_wrong_prompt_is_refused(inputs: InputProcessor, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        inputs.process(prompt, SamplingParams())


def test_text_without_tokens_is_refused(tokenizer: Any) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.ByteLevel()
    plain: Any = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(RequestError, match="empty"):
        InputProcessor(plain, vocab_size=300, max_model_len=32).process("", SamplingParams())


@pytest.mark.parametrize(("length", "max_tokens"), [(32, 1), (40, 1), (31, 2), (20, 13)])
def test_what_cannot_fit_is_refused_with_the_numbers(inputs: InputProcessor, length: int, max_tokens: int) -> None:
    """C50: an overlong prompt is an answer, not a silence."""
    with pytest.raises(RequestTooLargeError, match=rf"\b{length} tokens.* 32\b"):
        inputs.process({"prompt_token_ids": [5] * length}, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(("length", "max_tokens"), [(31, 1), (1, 31), (20, 12)])
def test_what_just_fits_is_taken(inputs: InputProcessor, length: int, max_tokens: int) -> None:
    request, _ = inputs.process({"prompt_token_ids": [5] * length}, SamplingParams(max_tokens=max_tokens))
    assert request.max_output_tokens == max_tokens


def test_stop_ids_outside_the_vocabulary_are_refused(inputs: InputProcessor) -> None:
    with pytest.raises(RequestError, match="stop_token_ids holds 300; the vocabulary is 0 to 299"):
        inputs.process("a", SamplingParams(stop_token_ids=(300,)))


def test_without_max_tokens_a_request_goes_on_to_the_end(inputs: InputProcessor) -> None:
    request, _ = inputs.process({"prompt_token_ids": [5] * 20}, SamplingParams(max_tokens=None, min_tokens=12))
    assert request.max_output_tokens == 12
    with pytest.raises(RequestError, match=r"min_tokens=13 cannot be reached.* 12 new tokens"):
        inputs.process({"prompt_token_ids": [5] * 20}, SamplingParams(max_tokens=None, min_tokens=13))


def test_an_end_of_sequence_id_alone_cannot_be_allowed_with_min_tokens(inputs: InputProcessor) -> None:
    only_eos: dict[str, Any] = {"allowed_token_ids": (257,), "min_tokens": 2}
    with pytest.raises(RequestError, match="nothing but ids that end the request"):
        inputs.process("a", SamplingParams(**only_eos))
    assert inputs.process("a", SamplingParams(ignore_eos=True, **only_eos))


def test_bad_words_become_sequences_of_ids(inputs: InputProcessor, tokenizer: Any) -> None:
    request, _ = inputs.process("a", SamplingParams(bad_words=["no", "né"]))
    assert request.bad_words == (tuple(ids(tokenizer, "no")), tuple(ids(tokenizer, "né")))


def test_a_salt_is_a_tagged_part_of_the_cache_keys(inputs: InputProcessor) -> None:
    """C27, C31."""
    for prompt in ({"prompt": "a", "cache_salt": "s"}, {"prompt_token_ids": [5], "cache_salt": "s"}):
        request, processed = inputs.process(prompt, SamplingParams())  # type: ignore[arg-type]
        assert request.cache_extras == (("salt", "s"),)
        assert processed.cache_salt == "s"
    assert inputs.process("a", SamplingParams())[0].cache_extras == ()
    for wrong in ("", 3, "\ud800"):
        prompt_: Any = {"prompt": "a", "cache_salt": wrong}
        with pytest.raises(RequestError, match="'cache_salt'"):
            inputs.process(prompt_, SamplingParams())


@pytest.mark.parametrize("priority", [-(2**31), -1, 0, 7, 2**31 - 1])
def test_a_priority_goes_with_the_request(inputs: InputProcessor, priority: int) -> None:
    assert inputs.process("a", SamplingParams(), priority)[0].priority == priority


@pytest.mark.parametrize("priority", [None, True, 1.0, "1", 2**31, -(2**31) - 1, 10**400])
def test_a_wrong_priority_is_refused(inputs: InputProcessor, priority: Any) -> None:
    with pytest.raises(RequestError, match="priority must be"):
        inputs.process("a", SamplingParams(), priority)


def test_params_of_another_type_are_refused(inputs: InputProcessor) -> None:
    wrong: Any = {"temperature": 0}
    with pytest.raises(RequestError, match="must be SamplingParams, not dict"):
        inputs.process("a", wrong)


def test_without_a_tokenizer_only_ids_without_text_work(without_tokenizer: InputProcessor) -> None:
    silent = SamplingParams(detokenize=False)
    assert without_tokenizer.process({"prompt_token_ids": [5]}, silent)[0].num_prompt_tokens == 1
    with pytest.raises(RequestError, match="prompt_token_ids"):
        without_tokenizer.process("a", silent)
    with pytest.raises(RequestError, match="detokenize=False"):
        without_tokenizer.process({"prompt_token_ids": [5]}, SamplingParams())
    with pytest.raises(RequestError, match="no tokenizer"):
        without_tokenizer.chat_prompt([{"role": "user", "content": "a"}])


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_templated_prompt_has_one_beginning_token(inputs: InputProcessor, tokenizer: Any) -> None:
    prompt = inputs.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt["prompt"] == "<s>[user]hi[assistant]"
    assert list(prompt["prompt_token_ids"]) == [256, *ids(tokenizer, "[user]hi[assistant]")]
    assert inputs.parse(prompt).text == prompt["prompt"]


def test_the_generation_prompt_and_the_template_can_be_chosen(inputs: InputProcessor) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert inputs.chat_prompt(messages, add_generation_prompt=False)["prompt"] == "<s>[user]hi"
    assert inputs.chat_prompt(messages, chat_template="{{ messages[0].content }}!")["prompt"] == "hi!"


@pytest.mark.parametrize(
    ("messages", "template", "says"),
    [
        ([], None, "conversation is empty"),
        (["hi"], None, r"messages\[0\] must be a dictionary"),
        ([{"content": "hi"}], None, r"messages\[0\].*'role'"),
        ([{"role": "tool", "content": "x"}], None, "no tools"),
        ([{"role": "user", "content": "x"}], "{% if %}", "the chat template refused"),
        ([{"role": "user", "content": "x"}], "{{ messages[0].content + 1 }}", "the chat template refused"),
    ],
)
def test_a_wrong_conversation_is_refused(
    inputs: InputProcessor, messages: Any, template: str | None, says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        inputs.chat_prompt(messages, chat_template=template)


def test_no_chat_template_is_said(tokenizer: Any) -> None:
    plain: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    inputs = InputProcessor(plain, vocab_size=300, max_model_len=32)
    with pytest.raises(RequestError, match="has no chat template"):
        inputs.chat_prompt([{"role": "user", "content": "hi"}])
