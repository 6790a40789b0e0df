"""Rows without padding: every conversation can be read back from its row, and each token sees exactly its own past."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.training import packing
from stretto.training.packing import common_length, divide, merge, pack, shared_prefix
from tiny import sample

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@st.composite
def families(draw):
    """Sequences that often begin alike, by up to some dozens of tokens."""
    stems = draw(st.lists(tokens, min_size=1, max_size=3))
    sequences = []
    for _ in range(draw(st.integers(1, 9))):
        stem = draw(st.sampled_from(stems))
        middle = draw(st.sampled_from(stems)) if draw(st.booleans()) else []
        sequences.append(np.array(stem + middle + draw(st.lists(st.integers(0, 2), max_size=6)), dtype=np.int64))
    return sequences


def path(tree, index):
    """The segments a token of segment `index` may see."""
    return [tree.segments[number] for number in (*tree.segments[index].ancestors, index)]


@settings(max_examples=200)
@given(families(), st.sampled_from([1, 4, 16, 1000]))
def test_every_sequence_is_read_back_from_its_places(sequences, worth):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH_SHARING", worth)
        tree = merge(sequences)
    assert len(tree.places) == len(sequences)
    for sequence, places in zip(sequences, tree.places, strict=True):
        assert tree.tokens[places].tolist() == sequence.tolist()
        assert tree.positions[places].tolist() == list(range(len(sequence)))


@settings(max_examples=200)
@given(families(), st.sampled_from([1, 4, 16, 1000]))
def test_each_token_sees_exactly_its_own_prefix(sequences, worth):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH_SHARING", worth)
        tree = merge(sequences)
    owner = np.concatenate([np.full(s.length, index) for index, s in enumerate(tree.segments)])
    for places in tree.places:
        for at, place in enumerate(places):
            visible = [p for s in path(tree, owner[place]) for p in range(s.start, s.start + s.length) if p <= place]
            assert visible == places[: at + 1].tolist()


@settings(max_examples=100)
@given(families())
def test_segments_cover_the_row_without_gaps_and_parents_come_first(sequences):
    tree = merge(sequences)
    end = 0
    for index, segment in enumerate(tree.segments):
        assert segment.start == end
        assert segment.length > 0
        assert all(ancestor < index for ancestor in segment.ancestors)
        end += segment.length
    assert end == len(tree.tokens) == len(tree.positions)


@given(families())
def test_where_every_token_is_worth_sharing_the_row_is_the_smallest_possible_tree(sequences):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WORTH_SHARING", 1)
        tree = merge(sequences)
    prefixes = {tuple(sequence[: end + 1].tolist()) for sequence in sequences for end in range(len(sequence))}
    assert len(tree.tokens) == len(prefixes)


@given(families())
def test_merging_never_makes_a_row_longer(sequences):
    assert len(merge(sequences).tokens) <= sum(map(len, sequences))


def test_a_shared_prompt_stands_once_and_every_answer_continues_it():
    prompt = list(range(20))
    tree = merge([np.array([*prompt, 30, 31]), np.array([*prompt, 40]), np.array([*prompt, 50, 51, 52])])
    assert tree.tokens.tolist() == [*prompt, 30, 31, 40, 50, 51, 52]
    assert tree.positions.tolist() == [*range(20), 20, 21, 20, 20, 21, 22]
    assert [(s.start, s.length, s.ancestors) for s in tree.segments] == [
        (0, 20, ()),
        (20, 2, (0,)),
        (22, 1, (0,)),
        (23, 3, (0,)),
    ]


def test_a_system_prompt_and_the_prompts_below_it_make_a_tree_of_depth_three():
    system, first, second = list(range(16)), [*range(100, 120)], [*range(200, 220)]
    talks = [[*system, *first, 1], [*system, *first, 2], [*system, *second, 3], [*system, *second, 4]]
    tree = merge([np.array(talk) for talk in talks])
    assert [s.ancestors for s in tree.segments] == [(), (0,), (0, 1), (0, 1), (0,), (0, 4), (0, 4)]
    assert len(tree.tokens) == 16 + 20 + 20 + 4


def test_a_prefix_too_short_to_be_worth_a_segment_is_computed_twice():
    tree = merge([np.array([*range(15), 90]), np.array([*range(15), 91])])
    assert len(tree.tokens) == 32
    assert [s.ancestors for s in tree.segments] == [(), ()]


def test_a_conversation_that_another_one_continues_ends_inside_the_tree():
    short = list(range(20))
    tree = merge([np.array([*short, 30, 31]), np.array(short)])
    assert len(tree.tokens) == 22
    assert tree.places[1].tolist() == list(range(20))


def test_equal_conversations_are_computed_once():
    tree = merge([np.arange(20)] * 5)
    assert len(tree.tokens) == 20
    assert len(tree.segments) == 1


@given(tokens, tokens)
def test_a_shared_prefix_is_the_longest_one(first, second):
    length = shared_prefix(np.array(first), np.array(second))
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]
    assert common_length([np.array(each).tobytes() for each in (first, second, first)]) == length


def samples_of(sequences):
    return [sample(sequence, [len(sequence) - 1], attempt=index) for index, sequence in enumerate(sequences)]


@settings(max_examples=200)
@given(families(), st.integers(1, 150))
def test_rows_keep_the_order_and_stay_within_the_budget_unless_one_conversation_is_longer(sequences, budget):
    samples = samples_of(sequences)
    rows = divide(samples, budget)
    assert [s.key for row in rows for s in row] == [s.key for s in samples]
    for row in rows:
        assert len(row) == 1 or len(merge([s.conversation.tokens for s in row]).tokens) <= budget


def test_answers_to_one_prompt_share_a_row_because_the_prompt_counts_once():
    talks = samples_of([[*range(40), 90 + index] for index in range(10)])
    assert [len(row) for row in divide(talks, 50)] == [10]
    assert [len(row) for row in divide(talks, 49)] == [9, 1]


def test_a_full_row_is_cut_between_groups_where_no_prompt_is_computed_twice():
    groups = [[[*range(start, start + 60), 500 + index] for index in range(4)] for start in (0, 100, 200)]
    talks = samples_of([talk for group in groups for talk in group])
    assert [len(row) for row in divide(talks, 180)] == [8, 4], "two prompts of 60 and a part of the third had fit"
    assert [len(row) for row in divide(talks, 62)] == [2] * 6, "a group that is too large is cut all the same"


def test_unrelated_conversations_fill_rows_up_to_the_budget():
    talks = samples_of([[index] * 10 for index in range(7)])
    assert [len(row) for row in divide(talks, 30)] == [3, 3, 1]
    assert [len(row) for row in divide(talks, 29)] == [2, 2, 2, 1]
    assert [len(row) for row in divide(talks, 3)] == [1] * 7


def test_nothing_divides_into_nothing():
    assert divide([], 100) == []


def packed(samples):
    return pack(samples, device=torch.device("cpu"), dtype=torch.float64)


def test_shared_tokens_are_counted():
    batch = packed(samples_of([[*range(20), 30, 31], [*range(20), 40]]))
    assert len(batch.tokens) == 23
    assert batch.shared == 22 + 21 - 23


def test_streams_stand_conversation_after_conversation():
    one = sample([5, 6, 7, 8, 9], [2, 4], advantage=[0.5, 0.25], logprobs=[-1.0, -2.0])
    other = sample([5, 3], [1], advantage=-1.0, logprobs=[-3.0], attempt=1)
    batch = packed([one, other])
    assert batch.targets.tolist() == [7, 9, 3]
    assert batch.tokens[batch.sources].tolist() == [6, 8, 5]
    assert batch.rows.advantage.tolist() == [0.5, 0.25, -1.0]
    assert batch.rows.engine.tolist() == [-1.0, -2.0, -3.0]
    assert batch.rows.conversation.tolist() == [0, 0, 1]
    assert batch.rows.lengths.tolist() == [2, 1]
    assert (batch.rows.old, batch.rows.reference, batch.rows.values) == (None, None, None)


@settings(max_examples=50)
@given(families())
def test_each_trained_token_is_predicted_from_the_token_before_it(sequences):
    samples = [
        sample(sequence, range(1, len(sequence)), attempt=index)
        for index, sequence in enumerate(sequences)
        if len(sequence) > 1
    ]
    if not samples:
        return
    batch = packed(samples)
    told = [token for s in samples for token in s.conversation.tokens[1:].tolist()]
    before = [token for s in samples for token in s.conversation.tokens[:-1].tolist()]
    assert batch.targets.tolist() == told
    assert batch.tokens[batch.sources].tolist() == before
    places = [place for s in samples for place in range(len(s.conversation.tokens) - 1)]
    assert batch.positions[batch.sources].tolist() == places


def test_a_trained_token_that_nothing_predicts_is_an_error():
    with pytest.raises(ValueError, match="trains its first token"):
        packed([sample([1, 2], [1]), sample([3, 4], [0, 1], attempt=1)])


@pytest.mark.parametrize("name", ["old", "reference", "values", "returns"])
def test_a_stream_that_only_some_samples_have_is_an_error(name):
    with_stream = replace(sample([1, 2], [1]), **{name: np.array([-1.0])})
    assert getattr(packed([with_stream]).rows, name).tolist() == [-1.0]
    with pytest.raises(ValueError, match="some samples"):
        packed([with_stream, sample([3, 4], [1], attempt=1)])


def test_a_long_row_is_filled_up_with_tokens_of_nobody():
    """A short row is left as it is."""
    samples = samples_of([[index, *range(100, 442)] for index in range(3)])
    batch = packed(samples)
    assert sum(len(each.conversation.tokens) for each in samples) == 1029 and len(batch.tokens) == 1056
    assert batch.shared == 0 and int(batch.sources.max()) < 1029
    assert len(packed(samples_of([[0, *range(100, 429)]])).tokens) == 330
    assert batch.layout.segments[-1].ancestors == () and batch.layout.segments[-1].length == 27
